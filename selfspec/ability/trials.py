"""Trials of a model: a few tokens as a tree or a chain, compared with right and wrong answers.

Each wrong answer is what one fault would give: a node sees its sibling, positions are taken from
columns, or a kept slot holds another token. An outcome is right if it is far nearer to the right
answer than to each wrong one. Knows backends and forwards; not what a verdict is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from selfspec.ability.trial_layers import TrialLayers
from selfspec.compat.branching import state_functions
from selfspec.compat.generation import KV
from selfspec.compat.modules import is_compiled
from selfspec.compat.states import bounds_time_steps, no_way_back, states_of
from selfspec.forward.backends import Backend
from selfspec.forward.chains import ChainBackend
from selfspec.forward.inputs import can_hold_trees, plain_inputs
from selfspec.forward.model import AttentionTypes, device_of, takes
from selfspec.forward.prompt import Prefilled, given_positions, next_positions, placing_reason
from selfspec.records import DraftTree

# An outcome is clearly right if its distance to the right answer is this share of the distance to
# each wrong one, and clearly wrong if it is above the second share. Between the two it is right if
# another plain forward of the same tokens is as far from the right answer, within this factor:
# then rounding, or noise of the model's own, explains the distance.
_CLEARLY_RIGHT = 0.02
_CLEARLY_WRONG = 0.5
_LIKE_PLAIN = 16
# How much of an outcome hidden tokens may change, as a share of what seeing them would change. A
# mask that leaks changes more. The first share is for experts in half precision: they sort their
# tokens, so that hidden ones affect their rounding. The second is for all other models, in which
# rows that are quantised with one scale affect each other.
_HIDDEN, _HIDDEN_IN_ROWS = 0.1, 1e-3
# How far a forward over several tokens may be from plain steps, as a share of how far it would be
# without the tokens before the last one. Rounding is smaller than the first share in any precision,
# and smaller than the second one in float32.
_ROUNDING, _ROUNDING_32 = 0.25, 1e-4
_PROMPT = 3  # The prompt of a trial has this many tokens, or as many as fill a window.
_AFTER = 7  # This many follow it.
# The kinds of running states that a faulty forward may leave out.
_STATES = {
    "states": ("conv_states", "recurrent_states"),
    "recurrent states": ("recurrent_states",),
    "convolution's window": ("conv_states",),
}


class _Text(NamedTuple):
    """A text to run plainly, with positions, and the indices of the tokens to compare.

    Where it is read in two forwards, the first one reads `num_prompt` tokens.
    """

    ids: Sequence[int]
    positions: Sequence[int]
    compared: Sequence[int]
    num_prompt: int = _PROMPT


class _Fault(NamedTuple):
    """A text that gives what a fault would give, in some rows of the outcome."""

    name: str
    text: _Text
    rows: Sequence[int]


def check_tree(
    model: Any,
    ids: Sequence[int],
    types: AttentionTypes,
    layers: TrialLayers,
    new_backend: Callable[..., Any],
    crowds: Sequence[Sequence[int]] = (),
) -> str | None:
    """Why the model can't verify trees; None if it can.

    The tree is a root with a wrong child and a right one, b, which has a child c. The path root-b-c
    is kept. Then d follows as the root of another tree, and alone, as in a plain step. The wrong
    child comes before the right one, so that b and c are in other slots than their positions say.
    What comes before the last `_AFTER` ids is the prompt. `crowds` of other children must make no
    difference either: one of them is likely to have the largest value of some layer.
    """
    prompt, (root, b, c, d, *wrong) = list(ids[:-_AFTER]), ids[-_AFTER:]
    end = len(prompt)
    cache = prefilled(model, prompt, layers)
    types = layers.types(types)
    if reason := can_hold_trees(cache, types.by_layer):
        return reason
    compared = [end, end + 1, end + 2, end + 3, end + 3]
    right = _Text([*prompt, root, b, c, d], range(end + 4), compared, end)
    faults = _faults_of_trees(right, wrong[0])
    truth, *answers = _read(model, [right, *(fault.text for fault in faults)], layers)
    if types.states:  # Plain steps are right, also where forwards over several tokens are not.
        steps = _stepped(model, right._replace(compared=compared[:-1]), layers)
        truth = torch.cat([steps, steps[-1:]])
    arguments = _arguments(model, cache, range(end + 1))
    prompt_ids = torch.tensor([prompt], device=device_of(model))
    if reason := placing_reason(given_positions(model, prompt_ids, arguments), arguments):
        return reason
    backend = new_backend(model, types)
    most = max(map(len, crowds), default=0)
    position = next_positions(model, prompt_ids, arguments)
    rows = backend.add(cache, position, max_columns=end + 24 + most)
    path = [0, 2, 3]

    def first_step(*others: int) -> torch.Tensor:
        outcome = _outcome(backend, rows, _tree(root, others, [b, c]), layers)
        return outcome[[0, len(others) + 1, len(others) + 2]]

    share = _HIDDEN if _sorts_tokens(model) else _HIDDEN_IN_ROWS
    # The last forward is the one whose keys and values are kept.
    room = max(backend.max_width(8 + most) - 3, 1)  # No tree may cross a block of Llama 4.
    crowds = [crowd[:room] for crowd in crowds]
    for some, others in (*pairwise(crowds), (wrong[1:2], wrong[:1])):
        unseen, first = first_step(*some), first_step(*others)
        if _depends_on_hidden(first, unseen, answers[0], share, partial(first_step, *others)):
            return "the outcome of a node depends on nodes that it must not see"
    backend.commit([path])
    second = _outcome(backend, rows, _tree(d, wrong[:3], []), layers)[:1]
    got = torch.cat([first, second, _outcome(backend, rows, DraftTree.of_root(d), layers)])
    backend.release()
    return _verdict(model, got, truth, faults, answers, lambda: _read_on(model, right, layers))


def _faults_of_trees(right: _Text, wrong: int) -> list[_Fault]:
    """What a model would do wrong with a tree whose root has a wrong child before the right one."""
    *before, b, c, d = right.ids
    old, n = range(len(before)), len(before)
    seeing_all = _Text([*before, wrong, b, c, d], [*old, n, n, n + 1, n + 2], [n + 1, n + 2])
    other_slots = _Text([*before, wrong, b, d], range(n + 3), [n + 2, n + 2])
    by_column = right._replace(positions=[*old, n + 1, n + 2, n + 2], compared=[n, n + 1])
    all_slots = seeing_all._replace(compared=[n + 3, n + 3])
    return [
        _Fault("one that sees siblings", seeing_all, [1, 2]),
        _Fault("one with positions by column", by_column, [1, 2]),
        _Fault("one that keeps all slots", all_slots, [3, 4]),
        _Fault("one that keeps other slots", other_slots, [3, 4]),
    ]


def _depends_on_hidden(
    first: torch.Tensor,  # (N, D): the outcome of the root and of nodes that must not see a token
    unseen: torch.Tensor,  # (N, D): the same with another hidden token
    seeing: torch.Tensor,  # (N - 1, D): the outcome of nodes that see the hidden token
    share: float,  # of what seeing the token would change, that may change nevertheless
    again: Callable[[], torch.Tensor],  # repeats the first forward, which shows the model's noise
) -> bool:
    """Whether another hidden token changes more than experts or the model's own noise explain."""
    changed, limit = _distance(first, unseen), share * _distance(first[1:], seeing)
    return changed > limit and changed > limit + 4 * _distance(first, again())


def check_chain(
    model: Any, ids: Sequence[int], layers: TrialLayers, crowds: Sequence[Sequence[int]]
) -> str | None:
    """Why the model can't verify chains; None if it can.

    The chain has three drafts of which one is kept. Two more tokens follow it, one by one. Tokens
    must not depend on the `crowds` of tokens that may follow them in the same forward.
    """
    if bounds_time_steps(model):
        return "a forward over several tokens bounds its time steps, and plain steps do not"
    prompt, (root, a, b, c, d, e) = list(ids[:_PROMPT]), ids[_PROMPT : _PROMPT + 6]
    cache = prefilled(model, prompt, layers)
    if reason := no_way_back(cache) or (states_of(cache) and states_reason(model)):
        return reason
    if _depends_on_later(model, [*prompt, root, a], layers, crowds):
        return "the outcome of a token depends on tokens that come later"
    arguments = _arguments(model, cache, range(len(prompt) + 1))
    backend, input_ids = ChainBackend(model), torch.tensor([prompt], device=device_of(model))
    backend.admit(Prefilled(input_ids, arguments, input_ids.new_empty(0)))
    outcomes = [_outcome(backend, (), _tree(root, [], [a, b, c]), layers)[:2]]
    backend.commit([[0, 1]])
    for token in (d, e):
        outcomes.append(_outcome(backend, (), DraftTree.of_root(token), layers))
        backend.commit([[0]])

    right = _Text([*prompt, root, a, d, e], range(7), [3, 4, 5, 6])
    faults = [
        _Fault("one that crops nothing", _Text([*prompt, root, a, b, c, d], range(8), [7]), [2]),
        _Fault("one that keeps nothing", _Text([*prompt, d], range(4), [3]), [2]),
    ]
    whole, *answers = _read(model, [right, *(fault.text for fault in faults)], layers)
    # Plain steps are right, also where forwards over several tokens are not.
    steps = _stepped(model, right, layers)
    rounding = _distance(whole, steps)
    is_exact = model.dtype == torch.float32 and states_of(cache)
    most = _ROUNDING_32 if is_exact else _ROUNDING
    if rounding > most * _distance(answers[1], steps[2:3]):
        return "several tokens in one forward give other results than one after the other"
    for name, kinds in _STATES.items():
        # A forward that begins with empty states, and one after which the states are empty.
        for text, rows in ((right._replace(ids=right.ids[:5]), [0, 1]), (right, [3])):
            answer = _read_without(model, text, len(rows), kinds, layers)
            if _distance(answer, steps[rows]) > 2 * rounding:  # Else it shows nothing.
                faults.append(_Fault(f"one without its {name}", text, rows))
                answers.append(answer)
    got = torch.cat(outcomes)
    # The wrong answer that is nearest says best what is wrong.
    distances = [
        _distance(got[list(fault.rows)], answer)
        for fault, answer in zip(faults, answers, strict=True)
    ]
    order = sorted(range(len(faults)), key=distances.__getitem__)
    faults, answers = [faults[i] for i in order], [answers[i] for i in order]
    return _verdict(model, got, steps, faults, answers, lambda: whole)


def states_reason(model: Any) -> str | None:
    """Why running states of a model can't follow a path of drafts; None if no reason is found."""
    if any(map(is_compiled, model.modules())):
        return "torch.compile runs layers that keep running states, and may trace what they call"
    return None if state_functions(model) else "its running states are moved on by code of its own"


def _depends_on_later(
    model: Any, ids: Sequence[int], layers: TrialLayers, crowds: Sequence[Sequence[int]]
) -> bool:
    """Do the last two of some tokens come out otherwise if others follow them in their forward?"""
    start = len(ids) - 2

    def before(crowd: Sequence[int]) -> torch.Tensor:
        cache = prefilled(model, ids[:start], layers)
        return _run(model, [*ids[start:], *crowd], start, cache, layers)[0, :2].float()

    share = _HIDDEN if _sorts_tokens(model) else _HIDDEN_IN_ROWS
    outcomes = [before(crowd) for crowd in crowds]
    return any(
        _depends_on_hidden(first, unseen, first[:1], share, partial(before, crowds[0]))
        for first, unseen in pairwise(outcomes)
    )


def check_prompt(
    model: Any, ids: Sequence[int], layers: TrialLayers, crowds: Sequence[Sequence[int]]
) -> str | None:
    """Why a prompt must be read at once; None if its first part does not depend on the rest."""
    if bounds_time_steps(model):
        return "a part of a single token is read as a plain step, which bounds no time steps"

    def before(crowd: Sequence[int]) -> torch.Tensor:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        layers.cut(cache)
        return _run(model, [*ids[:2], *crowd], 0, cache, layers)[0, :2].float()

    share = _HIDDEN if _sorts_tokens(model) else _HIDDEN_IN_ROWS
    first, unseen = map(before, crowds)
    if _depends_on_hidden(first, unseen, first[:1], share, partial(before, crowds[0])):
        return "the tokens of its prompts see those that come later"
    return None


def check_logits(model: Any, ids: Sequence[int]) -> str | None:
    """Why the model does not return the logits of every token; None if it does.

    Nothing is run if the model takes `logits_to_keep`, as those of transformers do.
    """
    if takes(model, "logits_to_keep"):
        return None
    input_ids = torch.tensor([list(ids[:2])], device=device_of(model))
    shape = tuple(model(input_ids=input_ids, use_cache=False).logits.shape[:2])
    return None if shape == (1, 2) else f"it gives logits of shape {shape} for (1, 2) tokens"


def _verdict(
    model: Any,
    got: torch.Tensor,  # (N, D)
    truth: torch.Tensor,  # (N, D)
    faults: Sequence[_Fault],
    answers: Sequence[torch.Tensor],
    read_on: Callable[[], torch.Tensor],
) -> str | None:
    """Why the outcome is not right; None if it is. `read_on` computes the truth in another way."""
    rounding: float | None = None
    for fault, answer in zip(faults, answers, strict=True):
        rows = list(fault.rows)
        right, wrong = _distance(got[rows], truth[rows]), _distance(got[rows], answer)
        if right <= _CLEARLY_RIGHT * wrong:
            continue
        if rounding is None:  # Two outcomes may happen to have the same bits.
            rounding = max(_distance(read_on(), truth), torch.finfo(model.dtype).eps / 4)
        # An answer that is the truth but for rounding shows no fault.
        shows_fault = _distance(answer, truth[rows]) > 2 * rounding
        if right > _CLEARLY_WRONG * wrong and shows_fault:
            return f"its outcome is no nearer to the right one than to {fault.name}"
        if right > _LIKE_PLAIN * rounding:
            return f"its outcome is too near to {fault.name}, and plain forwards agree better"
    return None


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """The largest distance between two rows of (N, D), as a share of the other row's length."""
    some, others = some.double(), others.double()
    lengths = torch.linalg.vector_norm(others, dim=-1).clamp(min=1e-30)
    return float((torch.linalg.vector_norm(some - others, dim=-1) / lengths).max())


def _sorts_tokens(model: Any) -> bool:
    """Has a model experts that round a token otherwise if others have chosen them too?"""
    names = vars(model.config.get_text_config(decoder=True))
    named = [name for name in names if not name.startswith("_")]
    has_experts = any("expert" in name or "moe" in name for name in named)
    return has_experts and bool(model.dtype != torch.float32)


def _tree(root: int, wrong: Sequence[int], chain: Sequence[int]) -> DraftTree:
    """A root with wrong children, followed by a chain of right nodes."""
    tree = DraftTree.of_root(root)
    for token in wrong:
        tree.add(0, token, 0.5)
    node = 0
    for token in chain:
        node = tree.add(node, token, 0.4)
    return tree


def _read(model: Any, texts: Sequence[_Text], layers: TrialLayers) -> list[torch.Tensor]:
    """The outcome of each text's compared tokens (N, D), in one plain forward without a KV cache.

    Shorter texts are padded on the right, where no compared token sees it.
    """
    length = max(len(text.ids) for text in texts)
    rows = [(*text.ids, *[text.ids[-1]] * (length - len(text.ids))) for text in texts]
    input_ids = torch.tensor(rows, device=device_of(model))
    # A mask of ones keeps transformers from taking odd positions for several texts in one row.
    arguments = {"attention_mask": torch.ones_like(input_ids), "use_cache": False}
    if takes(model, "position_ids"):
        arguments["position_ids"] = torch.tensor(
            [(*text.positions, *range(length))[:length] for text in texts], device=device_of(model)
        )
    own = plain_inputs(model, input_ids, arguments, length)
    # A model that drops positions would count columns.
    inputs = arguments | {name: value for name, value in own.items() if value is not None}
    inputs.pop("logits_to_keep", None)
    outcomes = layers.outcome(lambda: model(**inputs).logits)
    return [row[list(text.compared)].float() for row, text in zip(outcomes, texts, strict=True)]


def _read_on(model: Any, text: _Text, layers: TrialLayers) -> torch.Tensor:
    """The outcome of a text's compared tokens (N, D), in a forward after that of the prompt."""
    start = text.num_prompt
    cache = prefilled(model, text.ids[:start], layers)
    outcome = _run(model, text.ids[start:], start, cache, layers)[0]
    return outcome[[index - start for index in text.compared]].float()


def _read_without(
    model: Any, text: _Text, num_last: int, kinds: Sequence[str], layers: TrialLayers
) -> torch.Tensor:
    """The outcome of a text's last tokens (N, D), in a forward that begins with empty states."""
    start = len(text.ids) - num_last
    cache = prefilled(model, text.ids[:start], layers)
    for held, index in states_of(cache, kinds):
        held[index].zero_()
    return _run(model, text.ids[start:], start, cache, layers)[0].float()


def _stepped(model: Any, text: _Text, layers: TrialLayers) -> torch.Tensor:
    """The outcome of a text's compared tokens (N, D), by plain steps."""
    cache = prefilled(model, text.ids[: text.num_prompt], layers)
    steps = [_run(model, [text.ids[i]], i, cache, layers)[0] for i in text.compared]
    return torch.cat(steps).float()


def prefilled(
    model: Any, prompt: Sequence[int], layers: TrialLayers, num_rows: int = 1
) -> DynamicCache:
    """A KV cache that holds the prompt, for the layers that are run."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    layers.cut(cache)
    _run(model, prompt, 0, cache, layers, num_rows)
    return cache


def _run(
    model: Any,
    ids: Sequence[int],
    start: int,
    cache: DynamicCache,
    layers: TrialLayers,
    num_rows: int = 1,
) -> torch.Tensor:
    """The outcome (B, Q, D) of equal rows that follow the `start` tokens in the cache."""
    input_ids = torch.tensor([list(ids)] * num_rows, device=device_of(model))
    arguments = _arguments(model, cache, range(start, start + len(ids)), num_rows)
    inputs = plain_inputs(model, input_ids, arguments, len(ids))
    inputs.pop("logits_to_keep", None)  # Bamba would give the last ones alone.
    return layers.outcome(lambda: model(**inputs).logits)


def _arguments(
    model: Any, cache: DynamicCache, positions: Sequence[int], num_rows: int = 1
) -> dict[str, Any]:
    """What `generate()` would hold for some equal rows, of which the model makes its inputs."""
    arguments: dict[str, Any] = {KV: cache, "use_cache": True}
    if takes(model, "position_ids"):
        arguments["position_ids"] = torch.tensor([positions] * num_rows, device=device_of(model))
    return arguments


def _outcome(
    backend: Backend, rows: Sequence[Any], tree: DraftTree, layers: TrialLayers
) -> torch.Tensor:
    """The outcome (Q, D) of each node of a tree."""
    outcome = layers.outcome(lambda: backend.forward(backend.lay_out(rows, [tree])).logits)[0]
    return outcome[-len(tree.tokens) :].float()  # Tokens that are read again come first.
