"""Trials of a model: a few tokens as a tree or a chain, compared with right and wrong answers.

Each wrong answer is what one fault would give: a node sees its sibling, positions are taken from
columns, or a kept slot holds another token. An output is right if it is far nearer to the right
answer than to any wrong one. Knows backends and forwards; not what a verdict is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from selfspec.ability.readings import (
    Text,
    arguments_at,
    prefilled,
    read_at_once,
    read_by_steps,
    read_in_two,
)
from selfspec.ability.trial_layers import TrialLayers
from selfspec.forward.backends import Backend
from selfspec.forward.inputs import can_hold_trees
from selfspec.forward.model import AttentionTypes, device_of
from selfspec.forward.prompt import next_positions, placing_reason, plain_positions
from selfspec.records import DraftTree

# An output is clearly right if its distance to the right answer is this share of the distance to
# each wrong one, and clearly wrong if it is above the second share. Between the two it is right if
# another plain forward of the same tokens is as far from the right answer, within this factor:
# then rounding, or noise in the model, explains the distance.
_CLEARLY_RIGHT = 0.02
_CLEARLY_WRONG = 0.5
_LIKE_PLAIN = 16
# A wrong answer shows a fault if rounding, times this, does not reach from it to the right one.
BEYOND_ROUNDING = 2
# How much of an output hidden tokens may change, as a share of what seeing them would change. A
# mask that leaks changes more. The first share is for experts in half precision: they sort their
# tokens, so that hidden ones affect their rounding. The second is for all other models, in which
# rows that are quantised with one scale affect each other.
_HIDDEN, _HIDDEN_IN_ROWS = 0.1, 1e-3
# Beside that share, they may change so many times what the same forward changes once more.
_LIKE_NOISE = 4
_AFTER = 7  # This many follow the prompt of a tree.


class Wrong(NamedTuple):
    """What a model with a fault would give in some rows of the output."""

    fault: str
    rows: list[int]
    answer: torch.Tensor  # (N, D)

    def distance(self, output: torch.Tensor) -> float:
        return distance_of(output[self.rows], self.answer)


# The rows of the output of a tree. D is the root of a second tree, and then a plain step.
_ROOT, _B, _C, _D_OF_TREE, _D_ALONE = range(5)


def check_tree(
    model: PreTrainedModel,
    ids: Sequence[int],
    types: AttentionTypes,
    layers: TrialLayers,
    new_backend: Callable[..., Any],
    crowds: Sequence[Sequence[int]] = (),
) -> str | None:
    """Why the model can't verify trees; None if it can.

    ::

        prompt ─ root ┬ wrong
                      └ b ─ c         root ─ b ─ c is kept, and d follows it

    The wrong child comes before the right one, so that b and c are in other slots than their
    positions say. `crowds` of other wrong children must make no difference either: one of them is
    likely to have the largest value of some layer. The prompt is what comes before the last
    `_AFTER` ids.
    """
    prompt, (root, b, c, d, *wrong) = list(ids[:-_AFTER]), ids[-_AFTER:]
    end = len(prompt)
    cache = prefilled(model, prompt, layers)
    types = layers.types(types)
    if reason := can_hold_trees(cache, types.by_layer):
        return reason
    compared = [end, end + 1, end + 2, end + 3, end + 3]
    text = Text([*prompt, root, b, c, d], range(end + 4), compared, end)
    right, wrong_answers = _answers_of_trees(model, text, wrong[0], layers)
    arguments = arguments_at(model, cache, range(end + 1))
    prompt_ids = torch.tensor([prompt], device=device_of(model))
    positions = plain_positions(model, prompt_ids, arguments)
    if reason := placing_reason(positions, arguments):
        return reason
    # Plain steps are right, also where forwards over several tokens are not, and where the model
    # counts positions by itself, from another number than columns do.
    if types.states or positions is None:
        steps = read_by_steps(model, text._replace(compared=compared[:-1]), layers)
        right = torch.cat([steps, steps[-1:]])
    backend = new_backend(model, types)
    widest = max(map(len, crowds), default=0)
    position = next_positions(model, prompt_ids, arguments)
    rows = backend.add(cache, position, max_columns=end + 24 + widest)

    def first_step(*others: int) -> torch.Tensor:
        output = output_of(backend, rows, tree_of(root, others, [b, c]), layers)
        return output[[0, len(others) + 1, len(others) + 2]]

    # No tree may cross a block of Llama 4.
    most = max(backend.max_width(8 + widest) - 3, 1)
    crowds = [crowd[:most] for crowd in crowds]
    seeing_sibling = wrong_answers[0].answer
    # The last forward is the one whose keys and values are kept.
    for some, others in [*pairwise(crowds), (wrong[1:2], wrong[:1])]:
        unseen, first = first_step(*some), first_step(*others)
        if depends_on_hidden(model, first, unseen, seeing_sibling, partial(first_step, *others)):
            return "its tokens depend on tokens of the forward that masks hide"
    backend.commit([[0, 2, 3]])
    second = output_of(backend, rows, tree_of(d, wrong[:3], []), layers)[:1]
    alone = output_of(backend, rows, DraftTree.of_root(d), layers)
    backend.release()
    output = torch.cat([first, second, alone])
    return verdict(model, output, right, wrong_answers, lambda: read_in_two(model, text, layers))


def _answers_of_trees(
    model: PreTrainedModel, text: Text, wrong: int, layers: TrialLayers
) -> tuple[torch.Tensor, list[Wrong]]:
    """The right answer, and those of a model that does something wrong with the wrong child."""
    *before, b, c, d = text.ids
    old, n = range(len(before)), len(before)
    seeing_all = Text([*before, wrong, b, c, d], [*old, n, n, n + 1, n + 2], [n + 1, n + 2], n)
    faults = {
        "a model that sees other guesses": ([_B, _C], seeing_all),
        "a model with positions by column": (
            [_B, _C],
            text._replace(positions=[*old, n + 1, n + 2, n + 2], compared=[n, n + 1]),
        ),
        "a model that keeps all slots": (
            [_D_OF_TREE, _D_ALONE],
            seeing_all._replace(compared=[n + 3, n + 3]),
        ),
        "a model that keeps other slots": (
            [_D_OF_TREE, _D_ALONE],
            Text([*before, wrong, b, d], range(n + 3), [n + 2, n + 2], n),
        ),
    }
    texts = [faulty for _, faulty in faults.values()]
    right, *answers = read_at_once(model, [text, *texts], layers)
    wrong_answers = [
        Wrong(fault, rows, answer)
        for (fault, (rows, _)), answer in zip(faults.items(), answers, strict=True)
    ]
    return right, wrong_answers


def depends_on_hidden(
    model: PreTrainedModel,
    first: torch.Tensor,  # (N, D): the output of the root and of nodes that must not see a token
    unseen: torch.Tensor,  # (N, D): the same with another hidden token
    seeing: torch.Tensor,  # (N - 1, D): the output of nodes that see the hidden token
    again: Callable[[], torch.Tensor],  # repeats the first forward, which shows the model's noise
) -> bool:
    """Whether another hidden token changes more than experts or noise in the model explain."""
    share = _HIDDEN if _sorts_tokens(model) else _HIDDEN_IN_ROWS
    changed, limit = distance_of(first, unseen), share * distance_of(first[1:], seeing)
    return changed > limit and changed > limit + _LIKE_NOISE * distance_of(first, again())


def verdict(
    model: PreTrainedModel,
    output: torch.Tensor,  # (N, D)
    right: torch.Tensor,  # (N, D)
    wrong_answers: Sequence[Wrong],
    right_again: Callable[[], torch.Tensor],
) -> str | None:
    """Why the output is not right; None if it is. `right_again` computes it in another way."""
    if output.isnan().any() and not right.isnan().any():  # No comparison below would see it.
        return "its output is NaN, and that of plain forwards is not"
    rounding: float | None = None
    for wrong in wrong_answers:
        to_right = distance_of(output[wrong.rows], right[wrong.rows])
        to_wrong = wrong.distance(output)
        if to_right <= _CLEARLY_RIGHT * to_wrong:
            continue
        if rounding is None:  # Two outputs may happen to have the same bits.
            rounding = max(distance_of(right_again(), right), torch.finfo(model.dtype).eps / 4)
        # A wrong answer that differs from the right one by rounding alone shows no fault.
        shows_fault = distance_of(wrong.answer, right[wrong.rows]) > BEYOND_ROUNDING * rounding
        if to_right > _CLEARLY_WRONG * to_wrong and shows_fault:
            return f"in a trial its answers were those of {wrong.fault}"
        if to_right > _LIKE_PLAIN * rounding:
            return f"in a trial its answers were too near to those of {wrong.fault}"
    return None


def distance_of(some: torch.Tensor, others: torch.Tensor) -> float:
    """The largest distance between two rows of (N, D), as a share of the other row's length."""
    some, others = some.double(), others.double()
    lengths = torch.linalg.vector_norm(others, dim=-1).clamp(min=1e-30)
    return float((torch.linalg.vector_norm(some - others, dim=-1) / lengths).max())


def _sorts_tokens(model: PreTrainedModel) -> bool:
    """Has a model experts that round a token otherwise if others have chosen them too?"""
    names = vars(model.config.get_text_config(decoder=True))
    named = [name for name in names if not name.startswith("_")]
    has_experts = any("expert" in name or "moe" in name for name in named)
    return has_experts and bool(model.dtype != torch.float32)


def tree_of(root: int, wrong: Sequence[int], chain: Sequence[int]) -> DraftTree:
    """A root with wrong children, followed by a chain of right nodes."""
    tree = DraftTree.of_root(root)
    for token in wrong:
        tree.add(0, token, 0.5)
    node = 0
    for token in chain:
        node = tree.add(node, token, 0.4)
    return tree


def output_of(
    backend: Backend, rows: Sequence[Any], tree: DraftTree, layers: TrialLayers
) -> torch.Tensor:
    """The outputs (Q, D) of the nodes of a tree."""
    output = layers.output(lambda: backend.forward(backend.lay_out(rows, [tree])).logits)[0]
    return output.float()
