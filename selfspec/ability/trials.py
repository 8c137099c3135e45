"""Trials of a model: a few tokens as a tree or a chain, compared with right and wrong answers.

Each wrong answer is what one fault would give: a node sees its sibling, positions are taken from
columns, or a kept slot holds another token. An output is right if it is far nearer to the right
answer than to any wrong one. Knows backends and forwards; not what a verdict is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from selfspec.ability.readings import (
    TrialText,
    arguments_at,
    prefilled,
    read_at_once,
    read_by_steps,
    read_in_two,
    read_without_states,
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
_BEYOND_ROUNDING = 2
# How much of an output hidden tokens may change, as a share of what seeing them would change. A
# mask that leaks changes more. The first share is for experts in half precision: they sort their
# tokens, so that hidden ones affect their rounding. The second is for all other models, in which
# rows that are quantised with one scale affect each other.
_HIDDEN, _HIDDEN_IN_ROWS = 0.1, 1e-3
# Beside that share, they may change so many times what the same forward changes once more.
_LIKE_NOISE = 4
_AFTER = 7  # This many tokens follow the prompt of a tree.


class TrialForward(NamedTuple):
    """A forward over a tree, and the nodes whose output is compared; it may keep their KV."""

    tree: DraftTree
    compared: list[int]
    keeps: bool = True


class Fault(NamedTuple):
    """A fault that some rows of the output would show: they are then what the text gives.

    A model that `forgets` some states reads the last tokens of the text without them.
    """

    name: str
    rows: list[int]
    text: TrialText
    forgets: tuple[str, ...] = ()


class Trial(NamedTuple):
    """Forwards over drafts, the text whose compared tokens they must give, and possible faults."""

    text: TrialText
    forwards: list[TrialForward]
    faults: list[Fault]

    def output(self, backend: Backend, rows: Sequence[Any], layers: TrialLayers) -> torch.Tensor:
        """The output of the forwards: (N, D)."""
        outputs = []
        for forward in self.forwards:
            outputs.append(output_of(forward, backend, rows, layers))
            if forward.keeps:
                backend.kv.commit([forward.compared])
        return torch.cat(outputs)

    def answers(self, model: PreTrainedModel, layers: TrialLayers) -> list[torch.Tensor]:
        """What a plain forward gives for the text, and what a model with each fault would give.

        Faulty texts are longer: what a user's code does to the last column of a wide forward, as to
        the end of a prompt, is seen in no answer.
        """
        answers = read_at_once(model, [self.text, *(fault.text for fault in self.faults)], layers)
        for index, (_, rows, text, forgets) in enumerate(self.faults, 1):
            if forgets:
                answers[index] = read_without_states(model, text.ids, len(rows), forgets, layers)
        return answers


def output_of(
    forward: TrialForward, backend: Backend, rows: Sequence[Any], layers: TrialLayers
) -> torch.Tensor:
    """The outputs (N, D) of the nodes that are compared."""
    run = backend.lay_out(rows, [forward.tree])
    return layers.output(run)[0, forward.compared].float()


def tree_trial(ids: Sequence[int]) -> Trial:
    """A tree of which a path is kept, and what follows that as a tree's root and by itself.

    ::

        prompt ─ root ┬ wrong             prompt ─ root ─ b ─ c ─ d ┬ wrong      … ─ c ─ d
                      └ b ─ c                                       ├ wrong
                                                                    └ wrong
        rows      0       1   2                                   3                      4

    The wrong child comes before the right one, so that b and c are in other slots than their
    positions say. The prompt is what comes before the last seven ids.
    """
    prompt, (root, b, c, d, *wrong) = list(ids[:-_AFTER]), ids[-_AFTER:]
    start, before = len(prompt), [*prompt, root]
    n = start + 1  # The position of b.
    old = range(n)
    text = TrialText([*before, b, c, d], range(n + 3), [start, n, n + 1, n + 2, n + 2], start)
    seeing = TrialText(
        [*before, wrong[0], b, c, d], [*old, n, n, n + 1, n + 2], [n + 1, n + 2], start
    )
    by_column = text._replace(positions=[*old, n + 1, n + 2, n + 2], compared=[n, n + 1])
    keeping_others = TrialText([*before, wrong[0], b, d], range(n + 3), [n + 2, n + 2], start)
    faults = [
        Fault("a model that sees other guesses", [1, 2], seeing),
        Fault("a model with positions by column", [1, 2], by_column),
        Fault("a model that keeps all slots", [3, 4], seeing._replace(compared=[n + 3, n + 3])),
        Fault("a model that keeps other slots", [3, 4], keeping_others),
    ]
    forwards = [
        first_forward(text, wrong[:1]),
        TrialForward(tree_of(d, wrong, []), [0], keeps=False),
        TrialForward(DraftTree.of_root(d), [0], keeps=False),
    ]
    return Trial(text, forwards, faults)


def first_forward(text: TrialText, others: Sequence[int]) -> TrialForward:
    """The first forward of a tree's trial, with other wrong children."""
    root, b, c = text.ids[text.num_prompt :][:3]
    first = len(others) + 1
    return TrialForward(tree_of(root, others, [b, c]), [0, first, first + 1])


def check_tree(
    model: PreTrainedModel,
    ids: Sequence[int],
    types: AttentionTypes,
    layers: TrialLayers,
    new_backend: Callable[..., Any],
    crowds: Sequence[Sequence[int]] = (),
) -> str | None:
    """Why the model can't verify trees; None if it can.

    `crowds` of other wrong children must make no difference either: one of them is likely to have
    the largest value of some layer.
    """
    trial = tree_trial(ids)
    text = trial.text
    prompt = text.ids[: text.num_prompt]
    cache = prefilled(model, prompt, layers)
    types = layers.types(types)
    if reason := can_hold_trees(cache, types.by_layer):
        return reason
    arguments = arguments_at(model, cache, range(len(prompt) + 1))
    prompt_ids = torch.tensor([prompt], device=device_of(model))
    positions = plain_positions(model, prompt_ids, arguments)
    if reason := placing_reason(positions, arguments):
        return reason
    # Plain steps are right, also where forwards over several tokens are not, and where the model
    # counts positions by itself, from another number than columns do.
    right, *answers = trial.answers(model, layers)
    if types.states or positions is None:
        right = read_by_steps(model, text, layers)
    backend = new_backend(model, types)
    widest = max(map(len, crowds), default=0)
    position = next_positions(model, prompt_ids, arguments)
    rows = backend.add(cache, position, max_columns=text.num_prompt + 24 + widest)
    most = max(backend.max_width(8 + widest) - 3, 1)  # No tree may cross a block of Llama 4.
    crowds = [crowd[:most] for crowd in crowds]

    def with_others(others: Sequence[int]) -> torch.Tensor:
        return output_of(first_forward(text, others), backend, rows, layers)

    for some, others in [*pairwise(crowds), ([ids[-1]], [ids[-2]])]:
        unseen, first = with_others(some), with_others(others)
        again = partial(with_others, others)
        if depends_on_hidden(model, first, unseen, answers[0], again):
            return "its tokens depend on tokens of the forward that masks hide"
    output = trial.output(backend, rows, layers)
    backend.kv.release()
    again = partial(read_in_two, model, text, layers)
    return verdict(model, output, right, zip(trial.faults, answers, strict=True), again)


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
    wrong_answers: Iterable[tuple[Fault, torch.Tensor]],
    right_again: Callable[[], torch.Tensor],
) -> str | None:
    """Why the output is not right; None if it is. `right_again` computes it in another way."""
    if output.isnan().any() and not right.isnan().any():  # No comparison below would see it.
        return "its output is NaN, and that of plain forwards is not"
    rounding: float | None = None
    for fault, answer in wrong_answers:
        some, correct = output[fault.rows], right[fault.rows]
        to_right, to_wrong = distance_of(some, correct), distance_of(some, answer)
        if to_right <= _CLEARLY_RIGHT * to_wrong:
            continue
        if rounding is None:  # Two outputs may happen to have the same bits.
            rounding = max(distance_of(right_again(), right), torch.finfo(model.dtype).eps / 4)
        # A wrong answer that differs from the right one by rounding alone shows no fault.
        shows_fault = distance_of(answer, correct) > _BEYOND_ROUNDING * rounding
        if to_right > _CLEARLY_WRONG * to_wrong and shows_fault:
            return f"in a trial its answers were those of {fault.name}"
        if to_right > _LIKE_PLAIN * rounding:
            return f"in a trial its answers were too near to those of {fault.name}"
    return None


def distance_of(some: torch.Tensor, others: torch.Tensor) -> float:
    """The largest distance between two rows of (N, D), as a share of the other row's length."""
    some, others = some.double(), others.double()
    lengths = torch.linalg.vector_norm(others, dim=-1).clamp(min=1e-30)
    return float((torch.linalg.vector_norm(some - others, dim=-1) / lengths).max())


def _sorts_tokens(model: PreTrainedModel) -> bool:
    """Has a model experts that round a token differently when they serve other tokens too?"""
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
