"""What layers with running states compute over a tree: each node goes on from its own ancestors.

A layer of transformers reads the tokens of a forward one after the other, in chunks. Its rule for a
chunk holds for a tree too if "all tokens before this one" becomes "all ancestors of this node".
Parents come before their children. The rules write to no state: what the nodes would add to
it is a `StateUpdate`, by which `move_on` lets it follow a path. Sums are in float32, as in
transformers.

Shapes: B rows, W nodes, H heads, C channels of a convolution; a state is (K, V) for each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from selfspec.machine.device import upload


class Ancestry:
    """Which nodes of a forward go on from which."""

    def __init__(self, unseen: torch.Tensor, depths: torch.Tensor) -> None:
        self.unseen = unseen  # (B, W, W) bool: is node j neither node i nor one of its ancestors?
        self.depths = depths  # (B, W)
        self._windows: dict[int, torch.Tensor] = {}
        self._elsewhere: dict[torch.device, Ancestry] = {}

    @classmethod
    def of_chains(cls, num_rows: int, width: int, device: torch.device) -> Ancestry:
        """Each node goes on from all before it."""
        steps = torch.arange(width, device=device)
        unseen = steps > steps[:, None]
        return cls(unseen.expand(num_rows, -1, -1), steps.expand(num_rows, -1))

    def on(self, device: torch.device) -> Ancestry:
        """The same on the device of a layer."""
        if device == self.depths.device:
            return self
        if device not in self._elsewhere:
            parts = (part.to(device) for part in (self.unseen, self.depths))
            self._elsewhere[device] = Ancestry(*parts)
        return self._elsewhere[device]

    def windows(self, size: int) -> torch.Tensor:
        """(B, W, size): where each node is, and the tokens before it, the node coming last.

        They are counted from the first of `size` columns of a state, after which the nodes come.
        """
        if size not in self._windows:
            steps = torch.arange(size - 1, -1, -1, device=self.depths.device)
            depths = self.depths[..., None] - steps  # below 0: before the root
            is_it = self.depths[:, None, None] == depths[..., None]  # (B, W, size, W)
            nodes = torch.arange(self.depths.shape[1], device=steps.device)
            in_nodes = ((is_it & ~self.unseen[:, :, None]) * nodes).sum(-1)
            self._windows[size] = torch.where(depths < 0, depths, in_nodes) + size
        return self._windows[size]


class StateUpdate(NamedTuple):
    """What each node adds to a state, and how much of the state is left after it."""

    keys: torch.Tensor  # (..., B, H, W, K)
    values: torch.Tensor  # (..., B, H, W, V)
    decays: torch.Tensor  # (..., B, H, W, 1 or K): the logarithm of what is left


class Paths(NamedTuple):
    """The accepted nodes of each row; none where a row keeps its states, whatever was update."""

    is_on: torch.Tensor  # (B, W) bool
    last: torch.Tensor  # (B,): the last node; 0 where there is none

    @property
    def moves(self) -> torch.Tensor:
        """(B,): whether there are any."""
        return self.is_on.any(1)

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], width: int, device: torch.device) -> Paths:
        table = torch.zeros(len(paths), width + 1, dtype=torch.long, device="cpu")
        for row, path in enumerate(paths):
            table[row, list(path)] = 1
            table[row, width] = path[-1] if path else 0
        table = upload(table, device)
        return cls(table[:, :width].bool(), table[:, width])


def along(update: StateUpdate, paths: Paths) -> StateUpdate:
    """What paths add to states, and what they leave of them, (..., B, H, 1 or K, 1)."""
    is_on, moves = paths.is_on[:, None, :, None], paths.moves[:, None, None, None]
    ends = paths.last.view(*[1] * (update.decays.dim() - 4), -1, 1, 1, 1)
    left = update.decays.take_along_dim(ends, dim=-2)
    keys = update.keys * (left - update.decays).masked_fill(~is_on, -torch.inf).exp()
    keys, values = (part.masked_fill(~is_on, 0) for part in (keys, update.values))
    return StateUpdate(keys, values, left.masked_fill(~moves, 0).exp().mT)


def move_on(state: torch.Tensor, path: StateUpdate) -> None:
    """Lets a state (B, H, K, V) follow a path, by what `along` says of it."""
    keys, values = (part.flatten(0, 1).to(state.dtype) for part in (path.keys.mT, path.values))
    state.mul_(path.decays).flatten(0, 1).baddbmm_(keys, values)


def in_full(device_type: str) -> AbstractContextManager[Any]:
    """Without autocast: plain steps multiply states element by element, which it leaves alone."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def delta_rule(
    query: torch.Tensor,  # (B, W, H or fewer, K)
    key: torch.Tensor,
    value: torch.Tensor,  # (B, W, H, V)
    decay: torch.Tensor,  # (B, W, H), or (B, W, H, K) if each channel has a decay of its own
    beta: torch.Tensor,  # (B, W, H)
    state: torch.Tensor,  # (B, H, K, V)
    ancestry: Ancestry,
    *,
    normalises: bool,
) -> tuple[torch.Tensor, StateUpdate]:
    """The gated delta rule: what it gives for each node (B, W, H, V), and what it tells.

    With W = 1, this is a plain step.
    """
    dtype, num_sharing = query.dtype, value.shape[2] // key.shape[2]
    parts = (query, key, value, decay, beta)
    query, key, value, decay, beta = (part.transpose(1, 2).float() for part in parts)
    if normalises:
        query, key = _normalised(query), _normalised(key)
    if num_sharing > 1:
        query, key = (part.repeat_interleave(num_sharing, dim=1) for part in (query, key))
    query, beta = query * query.shape[-1] ** -0.5, beta[..., None]
    decays, between = _summed(decay if decay.dim() == 4 else decay[..., None], ancestry)
    both = torch.stack([query, key])  # (2, B, H, W, K)
    if decays.shape[-1] == 1:
        seen, known = (both @ key.mT) * between[..., 0]
    else:
        seen, known = ((part[..., None, :] * key[:, :, None] * between).sum(-1) for part in both)
    result, foretold = (both * decays.exp()) @ state.float()
    values = beta * (value - foretold)
    if values.shape[2] > 1:
        solve = torch.linalg.solve_triangular
        values = solve(beta * known, values, upper=False, unitriangular=True)
    result = result + seen @ values
    return result.transpose(1, 2).to(dtype), StateUpdate(key, values, decays)


def scan(
    x: torch.Tensor,  # (B, W, H, K)
    time_steps: torch.Tensor,  # (B, W, H)
    rates: torch.Tensor,  # (H,)
    inputs: torch.Tensor,  # (B, W, groups of heads, V): B in the paper
    outputs: torch.Tensor,  # (B, W, groups of heads, V): C in the paper
    state: torch.Tensor,  # (B, H, K, V)
    ancestry: Ancestry,
    *,
    skip: torch.Tensor | None,  # (H,): D in the paper
) -> tuple[torch.Tensor, StateUpdate]:
    """The scan of Mamba 2: what it gives for each node (B, W, H, K) in float32, and what it tells.

    The time steps are final: with their bias, and positive.
    """
    num_sharing = x.shape[2] // inputs.shape[2]
    x, time_steps = (part.transpose(1, 2).float() for part in (x, time_steps[..., None]))
    inputs, outputs = (
        part.transpose(1, 2).float().repeat_interleave(num_sharing, dim=1)
        for part in (inputs, outputs)
    )
    decays, between = _summed(time_steps * rates.float()[:, None, None], ancestry)
    added = x * time_steps
    result = outputs @ inputs.mT * between[..., 0] @ added
    result = result + outputs @ state.float().mT * decays.exp()
    if skip is not None:
        result = result + skip[:, None, None] * x
    return result.transpose(1, 2), StateUpdate(added, inputs, decays)


def final_time_steps(
    time_steps: torch.Tensor,  # (B, W, H)
    bias: torch.Tensor | None,
    *,
    is_softplus: bool,
) -> torch.Tensor:
    """The time steps of Mamba 2, in their own precision as in its functions."""
    if bias is not None:
        time_steps = time_steps + bias.to(time_steps.dtype)
    return softplus(time_steps) if is_softplus else time_steps


def convolved(
    columns: torch.Tensor,  # (B, size + W, C): those of the state, then the nodes
    windows: torch.Tensor,  # (B, W, size)
    weight: torch.Tensor,  # (C, size)
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """The short convolution (B, W, C) of each node with the tokens in front of it."""
    windows = across_rows(windows[..., -weight.shape[1] :], columns.shape[1])
    picked = columns.flatten(0, 1).index_select(0, windows.flatten())
    picked = picked.view(*windows.shape, -1).to(weight.dtype).float()
    taps = weight.mT.float()
    result = picked[:, :, 0] * taps[0]
    for number in range(1, len(taps)):
        result = torch.addcmul(result, picked[:, :, number], taps[number])
    result = (result if bias is None else result + bias.float()).to(weight.dtype)
    return (ACT2FN[activation](result) if activation else result).to(columns.dtype)


def across_rows(windows: torch.Tensor, num_columns: int) -> torch.Tensor:
    """The same columns (B, ...), counted from the first of all rows' columns."""
    first = torch.arange(len(windows), device=windows.device) * num_columns
    return windows + first.view(-1, *[1] * (windows.dim() - 1))


def _summed(decay: torch.Tensor, ancestry: Ancestry) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay (B, H, W, ·) from the state to each node, and what is left of j's part at node i.

    The first is a logarithm. The second (B, H, W, W, ·) is 0 where i does not go on from j.
    """
    unseen = ancestry.unseen[:, None, :, :, None]
    sums = decay[:, :, None].masked_fill(unseen, 0).sum(3)
    between = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(unseen, -torch.inf)
    return sums, between.exp()


def _normalised(x: torch.Tensor) -> torch.Tensor:
    lengths: torch.Tensor = (x * x).sum(-1, keepdim=True)
    return x * torch.rsqrt(lengths + 1e-6)
