"""Where the layers of a model meet the rules over trees: the functions that they call.

Layers call functions of the module that defines them. During a forward over trees these names stand
for functions that look at their first tensors: a state or columns that a layer of `States` shows in
this thread is worked on by a rule over trees, and everything else by the function that was there.
So plain steps of transformers, training, other models and other threads get what they would get.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import silu

from selfspec.compat.states import ROLES, StatePlace
from selfspec.compat.swapped import swapped
from selfspec.forward.states.rules import (
    Ancestry,
    convolved,
    delta_rule,
    final_time_steps,
    in_full,
    scan,
)
from selfspec.forward.states.slots import States

Function = tuple[ModuleType, str]


@contextmanager
def branching(states: States, ancestry: Ancestry, functions: Sequence[Function]) -> Iterator[None]:
    """Inside, in this thread, states branch. Use it for one forward.

    The functions are back in their places when no thread is inside any more. One that other code
    has replaced meanwhile is left alone.
    """
    states.begin(ancestry)
    outside = _this_thread.states
    with ExitStack() as swaps:
        for module, name in functions:
            swaps.enter_context(swapped(vars(module), name, partial(_Branching, name)))
        _this_thread.states = states
        try:
            yield
        finally:
            _this_thread.states = outside


class _ThisThread(threading.local):
    states: States | None = None


class _Branching:
    """Stands for a function of transformers."""

    def __init__(self, name: str, replaced: Callable[..., Any]) -> None:
        self.replaced_function = replaced
        self._rule = _RULES[ROLES[name]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        states = None if torch.compiler.is_compiling() else _this_thread.states
        if states is None:
            return self.replaced_function(*args, **kwargs)
        named = (kwargs.get("initial_state"), kwargs.get("initial_states"))
        place = states.place_of(*args[:2], *named)
        if place is None:
            return self.replaced_function(*args, **kwargs)
        with in_full(args[0].device.type):
            return self._rule(states, place, *args, **kwargs)


def _delta_rule(
    states: States,
    place: StatePlace,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = (query, key, value, g, beta, initial_state, states.ancestry(key.device))
    result, update = delta_rule(*parts, normalises=use_qk_l2norm_in_kernel)
    states.record(place, update)
    return result, initial_state


def _scan(
    states: States,
    place: StatePlace,
    hidden_states: torch.Tensor,  # (B, W, H, K)
    dt: torch.Tensor,  # (B, W, H)
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    initial_states: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,  # Plain steps, which are right, know no `dt_limit`.
) -> tuple[torch.Tensor, torch.Tensor]:
    steps = final_time_steps(dt, dt_bias, is_softplus=dt_softplus)
    parts = (hidden_states, steps, A, B, C, initial_states, states.ancestry(dt.device))
    result, update = scan(*parts, skip=D)
    states.record(place, update)
    return result.contiguous(), initial_states


def _scan_step(
    states: States,
    place: StatePlace,
    state: torch.Tensor,
    hidden_states: torch.Tensor,  # (B, H, K)
    dt: torch.Tensor,  # (B, H, K): the same for all K, as are the rates, the bias and D
    A: torch.Tensor,  # (H, K, V)
    B: torch.Tensor,  # (B, groups, V)
    C: torch.Tensor,
    D: torch.Tensor | None = None,  # (H, K)
    *,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,  # (H, K)
    dt_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    bias, skip = (None if part is None else part[:, 0] for part in (dt_bias, D))
    steps = final_time_steps(dt[..., 0], bias, is_softplus=dt_softplus)
    x, steps, inputs, outputs = (part[:, None] for part in (hidden_states, steps, B, C))
    rates = A[:, 0, 0]
    ancestry = states.ancestry(state.device)
    result, update = scan(x, steps, rates, inputs, outputs, state, ancestry, skip=skip)
    states.record(place, update)
    result = result[:, 0].to(hidden_states.dtype)
    return (result if z is None else result * silu(z)).to(hidden_states.dtype)


def _convolution(
    states: States,
    place: StatePlace,
    hidden_states: torch.Tensor,  # (B, C, size + W), as `States.columns` gave them
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    columns = hidden_states.mT
    ancestry = states.ancestry(columns.device)
    windows = ancestry.windows(columns.shape[1] - ancestry.depths.shape[1])
    return convolved(columns, windows, weight, bias, activation).mT


def _convolution_step(
    states: States,
    place: StatePlace,
    hidden_states: torch.Tensor,  # (B, C, 1)
    conv_state: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    return _convolution(states, place, states.columns(place, hidden_states), *args, **kwargs)


_RULES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution step": _convolution_step,
    "delta rule": _delta_rule,
    "scan": _scan,
    "scan step": _scan_step,
}
_this_thread = _ThisThread()
