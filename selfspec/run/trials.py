"""Trials of a model: a few tokens as a tree or a chain, beside the right answer and wrong ones.

Each wrong answer is what a fault would give: siblings seen, positions taken from columns, a kept
slot that holds another token. An outcome is right if it lies far nearer to the right answer than to
each of them. Knows backends and forwards; not what a verdict is used for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from selfspec.records import DraftTree
from selfspec.run.attention_types import AttentionTypes
from selfspec.run.backends import ChainBackend
from selfspec.run.depth import Depth
from selfspec.run.tree_kv import can_hold_trees

__all__ = ["check_chain", "check_logits", "check_tree"]

# An outcome is clearly right if its distance to the right answer is this share of the distance to
# each wrong one, and clearly wrong if it is above the second share. Between the two it is right if
# another plain forward of the same tokens is as far from the right answer, within this factor:
# then rounding, or noise of the model's own, explains the distance.
_CLEARLY_RIGHT = 0.02
_CLEARLY_WRONG = 0.5
_LIKE_PLAIN = 16
# What other hidden tokens may change, as a share of what seeing the hidden ones would change.
# Experts sort their tokens and so round by what the others are; a mask that leaks changes more.
_HIDDEN = 0.1
_PROMPT = 3  # tokens


class _Text(NamedTuple):
    """A text to be read plainly, and the indices of its tokens that are looked at."""

    ids: Sequence[int]
    positions: Sequence[int]
    looked_at: Sequence[int]

    def at(self, positions: Sequence[int], looked_at: Sequence[int]) -> _Text:
        """The same tokens at other positions."""
        return _Text(self.ids, positions, looked_at)


class _Fault(NamedTuple):
    """What an outcome would be if the model did something wrong, at some of its rows."""

    name: str
    text: _Text
    rows: Sequence[int]


def check_tree(
    model: Any,
    ids: Sequence[int],
    types: AttentionTypes,
    depth: Depth,
    new_backend: Callable[..., Any],
) -> str | None:
    """A root with a wrong child and a right one, b, with a child c; root-b-c is kept.

    Then d follows as the root of a tree, and alone, as in a plain step. The wrong child stands
    before the right one, so that b and c lie in other slots than their positions would give them.
    """
    prompt, (root, b, c, d, *wrong) = list(ids[:_PROMPT]), ids[_PROMPT:]
    cache = _prefilled(model, prompt, depth)
    if reason := can_hold_trees(cache):
        return reason
    right = _Text([*prompt, root, b, c, d], range(7), [3, 4, 5, 6, 6])
    seeing_all = _Text([*prompt, root, wrong[0], b, c, d], [*range(4), 4, 4, 5, 6], [5, 6])
    slots = _Text([*prompt, root, wrong[0], b, d], range(7), [6, 6])
    faults = [
        _Fault("one that sees siblings", seeing_all, [1, 2]),
        _Fault("one with positions by column", right.at([*range(4), 5, 6, 6], [4, 5]), [1, 2]),
        _Fault("one that keeps all slots", seeing_all.at(seeing_all.positions, [7, 7]), [3, 4]),
        _Fault("one that keeps other slots", slots, [3, 4]),
    ]
    truth, *answers = _read(model, [right, *(fault.text for fault in faults)], depth)
    position = torch.full((1, 1), len(prompt), device=model.device)
    backend = new_backend(model, cache, depth.types(types), position, None, room=16)

    def run(tree: DraftTree) -> torch.Tensor:
        return depth.outcome(lambda: backend.forward(backend.lay_out([tree])))[0].float()

    path = [0, 2, 3]
    unseen, first = (run(_tree(root, [hidden], [b, c]))[path] for hidden in wrong[1::-1])
    if _distance(first, unseen) > _HIDDEN * (seeing := _distance(first[1:], answers[0])):
        noise = _distance(first, run(_tree(root, wrong[:1], [b, c]))[path])
        if _distance(first, unseen) > _HIDDEN * seeing + 4 * noise:
            return "the outcome of a node depends on nodes that it must not see"
    backend.commit([path])
    second = run(_tree(d, wrong[:3], []))[:1]
    got = torch.cat([first, second, run(DraftTree.of_root(d))])
    backend.release()
    return _verdict(got, truth, faults, answers, lambda: _read_on(model, right, depth))


def check_chain(model: Any, ids: Sequence[int], depth: Depth) -> str | None:
    """A chain of three drafts of which one is kept, then one token behind it."""
    prompt, (root, a, b, c, d) = list(ids[:_PROMPT]), ids[_PROMPT : _PROMPT + 5]
    cache = _prefilled(model, prompt, depth)
    if not cache.is_croppable:
        return "its KV cache can't be cropped"
    kwargs = {"past_key_values": cache, "use_cache": True}
    if _takes_positions(model):
        kwargs["position_ids"] = torch.arange(len(prompt) + 1, device=model.device)[None]
    backend = ChainBackend(model, cache, torch.tensor([prompt], device=model.device), kwargs)

    def run(tree: DraftTree) -> torch.Tensor:
        return depth.outcome(lambda: backend.forward(backend.lay_out([tree])))[0].float()

    first = run(_tree(root, [], [a, b, c]))[:2]
    backend.commit([[0, 1]])
    got = torch.cat([first, run(DraftTree.of_root(d))])

    right = _Text([*prompt, root, a, d], range(6), [3, 4, 5])
    faults = [
        _Fault(
            "one with nothing taken back", _Text([*prompt, root, a, b, c, d], range(8), [7]), [2]
        ),
        _Fault("one that keeps nothing", _Text([*prompt, d], range(4), [3]), [2]),
    ]
    truth, *answers = _read(model, [right, *(fault.text for fault in faults)], depth)
    return _verdict(got, truth, faults, answers, lambda: _read_on(model, right, depth))


def check_logits(model: Any, ids: Sequence[int], depth: Depth) -> str | None:
    """A model must give the logits of each token that it is asked; two are asked for.

    Those of transformers do. Other trials have looked at logits if they ran all layers.
    """
    takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    if depth.last_layer is None or takes_logits_to_keep:
        return None
    input_ids = torch.tensor([list(ids[:2])], device=model.device)
    shape = tuple(model(input_ids=input_ids, use_cache=False).logits.shape[:2])
    return None if shape == (1, 2) else f"it gives logits of shape {shape} for (1, 2) tokens"


def _verdict(
    got: torch.Tensor,  # (N, D)
    truth: torch.Tensor,  # (N, D)
    faults: Sequence[_Fault],
    answers: Sequence[torch.Tensor],
    read_on: Callable[[], torch.Tensor],
) -> str | None:
    """Why the outcome is not right; None if it is. `read_on` is another plain way to the truth."""
    rounding: float | None = None
    for fault, answer in zip(faults, answers, strict=True):
        rows = list(fault.rows)
        right, wrong = _distance(got[rows], truth[rows]), _distance(got[rows], answer)
        if right <= _CLEARLY_RIGHT * wrong:
            continue
        is_wrong = right > _CLEARLY_WRONG * wrong
        if is_wrong and not torch.equal(answer, truth[rows]):  # Equal ones tell nothing apart.
            return f"its outcome is no nearer to the right one than to {fault.name}"
        rounding = _distance(read_on(), truth) if rounding is None else rounding
        if right > _LIKE_PLAIN * rounding:
            return f"its outcome is too near to {fault.name}, and plain forwards agree better"
    return None


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """The greatest distance of two rows of (N, D), as a share of their length."""
    some, others = some.double(), others.double()
    lengths = torch.linalg.vector_norm(others, dim=-1).clamp(min=1e-30)
    return float((torch.linalg.vector_norm(some - others, dim=-1) / lengths).max())


def _tree(root: int, wrong: Sequence[int], chain: Sequence[int]) -> DraftTree:
    """A root with wrong children, and behind them a chain of right nodes."""
    tree = DraftTree.of_root(root)
    for token in wrong:
        tree.add(0, token, 0.5)
    node = 0
    for token in chain:
        node = tree.add(node, token, 0.4)
    return tree


def _read(model: Any, texts: Sequence[_Text], depth: Depth) -> list[torch.Tensor]:
    """What comes out at each text's tokens (N, D), in one plain forward without a KV cache.

    Shorter texts are filled up behind their end, where nothing that is looked at sees it.
    """
    length = max(len(text.ids) for text in texts)
    rows = [(*text.ids, *[text.ids[-1]] * (length - len(text.ids))) for text in texts]
    input_ids = torch.tensor(rows, device=model.device)
    # A mask of ones keeps transformers from taking odd positions for several texts in one row.
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if _takes_positions(model):
        inputs["position_ids"] = torch.tensor(
            [(*text.positions, *range(length))[:length] for text in texts], device=model.device
        )
    outcomes = depth.outcome(lambda: model(**inputs, use_cache=False).logits)
    return [row[list(text.looked_at)].float() for row, text in zip(outcomes, texts, strict=True)]


def _read_on(model: Any, text: _Text, depth: Depth) -> torch.Tensor:
    """What comes out at a text's tokens (N, D), read behind a prompt that was read before."""
    cache = _prefilled(model, text.ids[:_PROMPT], depth)
    outcome = _run(model, text.ids[_PROMPT:], cache, depth)
    return outcome[[index - _PROMPT for index in text.looked_at]].float()


def _prefilled(model: Any, prompt: Sequence[int], depth: Depth) -> DynamicCache:
    """A KV cache that holds the prompt, with the layers that are run."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    depth.cut(cache)
    _run(model, prompt, cache, depth)
    return cache


def _run(model: Any, ids: Sequence[int], cache: DynamicCache, depth: Depth) -> torch.Tensor:
    input_ids = torch.tensor([list(ids)], device=model.device)
    inputs = {"input_ids": input_ids, "past_key_values": cache, "use_cache": True}
    return depth.outcome(lambda: model(**inputs).logits)[0]


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters
