"""Trials of chains: drafts after one another, and prompts that are read in parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from selfspec.ability.readings import (
    TrialText,
    arguments_at,
    new_cache,
    prefilled,
    read_by_steps,
    read_on,
)
from selfspec.ability.trial_layers import TrialLayers
from selfspec.ability.trials import (
    Fault,
    Trial,
    TrialForward,
    depends_on_hidden,
    distance_of,
    tree_of,
    verdict,
)
from selfspec.compat.modules import is_compiled
from selfspec.compat.states import (
    STATE_NAMES,
    bounds_time_steps,
    calls_state_functions,
    no_way_back,
    state_functions,
    states_by_place,
)
from selfspec.forward.chains import ChainBackend
from selfspec.forward.model import device_of
from selfspec.forward.prompt import Prefilled

# How far a forward over several tokens may differ from plain steps. It is a share of the difference
# that leaving out all tokens but the last would make. Rounding differs by less than the first share
# in any precision, and by less than the second in float32.
_ROUNDING, _ROUNDING_32 = 0.25, 1e-4
_PROMPT = 3  # The prompt of a chain has this many tokens.
# The kinds of running states that a faulty forward may leave out.
_STATES = {
    "states": STATE_NAMES,
    "recurrent states": ("recurrent_states",),
    "convolution's window": ("conv_states",),
}


def chain_trial(ids: Sequence[int], *, has_states: bool) -> Trial:
    """A chain whose first draft is kept, and two tokens that follow it one by one.

    ::

        prompt ─ root ─ a ─ b ─ c        prompt ─ root ─ a ─ d        prompt ─ root ─ a ─ d ─ e
        rows      0     1                                   2                                3
    """
    prompt, (root, a, b, c, d, e) = list(ids[:_PROMPT]), ids[_PROMPT : _PROMPT + 6]
    text = TrialText([*prompt, root, a, d, e], range(7), [3, 4, 5, 6], _PROMPT)
    uncropped = TrialText([*prompt, root, a, b, c, d], range(8), [7], _PROMPT)
    forgotten = TrialText([*prompt, d], range(4), [3], _PROMPT)
    faults = [
        Fault("a model that keeps nothing", [2], forgotten),
        Fault("a model that crops nothing", [2], uncropped),
    ]
    # A forward that begins with empty states, and one after which the states are empty.
    first = text._replace(ids=text.ids[:5])
    for name, kinds in _STATES.items() if has_states else ():
        faults.append(Fault(f"a model without its {name}", [0, 1], first, kinds))
        faults.append(Fault(f"a model without its {name}", [3], text, kinds))
    one_by_one = [TrialForward(tree_of(token, [], []), [0]) for token in (d, e)]
    return Trial(text, [TrialForward(tree_of(root, [], [a, b, c]), [0, 1]), *one_by_one], faults)


def check_chain(
    model: PreTrainedModel, ids: Sequence[int], layers: TrialLayers, crowds: Sequence[Sequence[int]]
) -> str | None:
    """Why the model can't verify chains; None if it can.

    Tokens must not depend on the `crowds` of tokens that may follow them in the same forward.
    """
    if bounds_time_steps(model.modules()):
        return "a forward over several tokens bounds its time steps, and plain steps do not"
    prompt = list(ids[:_PROMPT])
    cache = prefilled(model, prompt, layers)
    has_states = bool(states_by_place(cache.layers))
    if reason := no_way_back(cache) or (has_states and states_reason(model)):
        return reason
    if _depends_on_later(model, ids[: _PROMPT + 2], _PROMPT, layers, crowds):
        return "its tokens depend on those that come after them"
    trial = chain_trial(ids, has_states=has_states)
    # Plain steps are right, also where forwards over several tokens are not.
    right = read_by_steps(model, trial.text, layers)
    whole, *answers = trial.answers(model, layers)
    share = _ROUNDING_32 if has_states and model.dtype == torch.float32 else _ROUNDING
    if distance_of(whole, right) > share * distance_of(answers[0], right[[2]]):
        return "several tokens in one forward give other results than one after the other"
    backend = ChainBackend(model, functions=state_functions(model.modules()))
    input_ids = torch.tensor([prompt], device=device_of(model))
    arguments = arguments_at(model, cache, range(len(prompt) + 1))
    backend.admit(Prefilled(input_ids, arguments, input_ids.new_empty(0)))
    output = trial.output(backend, (), layers)
    # The wrong answer that is nearest says best what is wrong.
    pairs = list(zip(trial.faults, answers, strict=True))
    pairs.sort(key=lambda pair: distance_of(output[pair[0].rows], pair[1]))
    return verdict(model, output, right, pairs, lambda: whole)


def states_reason(model: PreTrainedModel) -> str | None:
    """Why running states of a model can't follow a path of drafts; None if no reason is found."""
    compiled = filter(is_compiled, model.modules())
    classes = {type(part) for layer in compiled for part in layer.modules()}
    if any(map(calls_state_functions, classes)):
        return "torch.compile runs layers that keep running states, and may trace what they call"
    functions = state_functions(model.modules())
    return None if functions else "its running states are moved on by code of its own"


def _depends_on_later(
    model: PreTrainedModel,
    ids: Sequence[int],
    start: int,
    layers: TrialLayers,
    crowds: Sequence[Sequence[int]],
) -> bool:
    """Do the last two of some tokens come out otherwise if others follow them in their forward?

    The first `start` tokens are read before.
    """

    def before(crowd: Sequence[int]) -> torch.Tensor:
        cache = prefilled(model, ids[:start], layers) if start else new_cache(model, layers)
        return read_on(model, [*ids[start:], *crowd], start, cache, layers)[0, :2].float()

    outputs = [before(crowd) for crowd in crowds]
    return any(
        depends_on_hidden(model, first, unseen, first[:1], partial(before, crowds[0]))
        for first, unseen in pairwise(outputs)
    )


def check_prompt(
    model: PreTrainedModel, ids: Sequence[int], layers: TrialLayers, crowds: Sequence[Sequence[int]]
) -> str | None:
    """Why a prompt must be read at once; None if its first part does not depend on the rest."""
    if bounds_time_steps(model.modules()):
        return "a part of a single token is read as a plain step, which bounds no time steps"
    if _depends_on_later(model, ids[:2], 0, layers, crowds):
        return "the tokens of its prompts see those that come later"
    return None
