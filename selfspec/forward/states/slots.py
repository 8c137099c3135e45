"""The running states of rows, which follow the paths that were accepted.

A forward over trees reads states and writes none. What its nodes would change is kept until the
paths are known. Then the states move on, layer by layer, and nothing is copied before or read again
after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from selfspec.compat.states import CONVOLUTION, StatePlace, states_by_place
from selfspec.errors import UnsupportedError
from selfspec.forward.states.rules import (
    Ancestry,
    Paths,
    StateUpdate,
    across_rows,
    along,
    in_full,
    move_on,
)


class Branches(NamedTuple):
    """One forward over trees: which nodes go on from which, and what they tell of each state.

    That is the columns (B, size + W, C) of a convolution, or what a rule adds to a state.
    """

    ancestry: Ancestry
    updates: dict[StatePlace, torch.Tensor | StateUpdate]

    @property
    def nbytes(self) -> int:
        parts = [
            update if isinstance(update, StateUpdate) else (update,)
            for update in self.updates.values()
        ]
        return sum(tensor.nbytes for part in parts for tensor in part)


class States:
    """The states of all rows that have a place, in one tensor for each state of each layer.

    `branches` belongs to the last forward, until its paths are known. `layers` are what the model
    sees, by their numbers: layers of ours, or transformers' layers that were taken over.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Any] = {}
        self.branches: Branches | None = None
        self.generation = 0  # Grows when states get another address.
        self.is_torn = False  # Have some moved on and others not, since an interrupt came?
        self._stores: dict[StatePlace, torch.Tensor] = {}  # (rows, size, C) or (rows, H, K, V)
        self._shapes: dict[StatePlace, torch.Size] = {}  # (C, size), (size,) or (H, K, V)
        # Keys: ids of tensors that layers show. The tensors are held here, so no id is used again.
        self._shown: dict[int, tuple[torch.Tensor, StatePlace]] = {}
        self._columns: dict[int, tuple[torch.Tensor, StatePlace]] = {}
        self._places = slice(0, 0)

    @property
    def placement(self) -> tuple[torch.dtype, torch.device]:
        store = next(iter(self._stores.values()))
        return store.dtype, store.device

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores.values())

    def add(self, layers: Sequence[Any], first: int, num_rows: int) -> None:
        """Takes in the states of a prompt's rows, and makes room for `num_rows` in all.

        If this breaks off, no other row has changed.
        """
        states = states_by_place(layers)
        new = {place: _turned(place, state) for place, state in states.items()}
        if not first and _formats(new) != _formats(self._stores):
            self._stores = {place: _new_store(state, 0) for place, state in new.items()}
            self._shapes = {place: state.shape[1:] for place, state in states.items()}
        self.make_room(num_rows)
        for place, state in new.items():
            self._stores[place][first : first + len(state)] = state

    def hand_back(self, layers: Sequence[Any]) -> None:
        """Lets transformers' layers that were taken over keep their states themselves again."""
        if self._places.stop:  # Otherwise an error came first, and the layers have their own.
            self.give_back(layers, self._places)
        for layer in self.layers.values():
            for name in ("update_conv_state", "update_recurrent_state"):
                vars(layer).pop(name, None)
        self.layers = {}

    def make_room(self, num_rows: int) -> None:
        """Makes room for this many rows."""
        for place, store in self._stores.items():
            if len(store) < num_rows:
                new = _new_store(store, num_rows)
                new[: len(store)] = store
                self._stores[place] = new
                self.generation += 1

    def show(self, places: slice) -> None:
        """Lets the layers show the states of these rows, which the next forwards are over."""
        self._places, self._shown = places, {}
        for place, state in self.shown_of(places).items():
            index, name, number = place
            layer = self.layers[index]
            getattr(layer, name)[number] = state
            layer.has_previous_state[number] = True
            self._shown[id(state)] = state, place

    def place_of(self, *tensors: Any) -> StatePlace | None:
        """Which state is among these; None if none is that the layers show in this forward."""
        for tensor in tensors:
            for shown in (self._shown, self._columns):
                if id(tensor) in shown:
                    return shown[id(tensor)][1]
        return None

    def columns(self, place: StatePlace, nodes: torch.Tensor) -> torch.Tensor:
        """The columns (B, C, size + W) that a convolution sees: of its state, and of nodes."""
        store = self._stores[place][self._places]
        update = torch.cat([store, _turned(place, nodes).to(store.dtype)], dim=1)
        self.record(place, update)
        columns = self._as_shown(place, update)
        self._columns[id(columns)] = columns, place
        return columns

    def begin(self, ancestry: Ancestry) -> None:
        """A forward begins."""
        self.branches, self._columns = Branches(ancestry, {}), {}

    def ancestry(self, device: torch.device) -> Ancestry:
        assert self.branches is not None
        return self.branches.ancestry.on(device)

    def record(self, place: StatePlace, update: torch.Tensor | StateUpdate) -> None:
        assert self.branches is not None
        self.branches.updates[place] = update

    def follow(self, first: int, paths: Sequence[Sequence[int]]) -> None:
        """Moves the states of rows that lie side by side on along these paths."""
        if not self._stores:
            return
        branches, self.branches = self.branches, None
        if branches is None or branches.updates.keys() != self._stores.keys():
            raise UnsupportedError(
                "a forward over several tokens moves its running states on by code of its own"
            )
        rows, self.is_torn = slice(first, first + len(paths)), True
        for device in {store.device for store in self._stores.values()}:
            stores = self._stores.items()
            states = {place: store[rows] for place, store in stores if store.device == device}
            ancestry = branches.ancestry.on(device)
            here = Branches(ancestry, {place: branches.updates[place] for place in states})
            on_device = Paths.of(paths, ancestry.depths.shape[1], device)
            with in_full(device.type):
                _move_columns(states, here, on_device)
                _move_by_rules(states, here.updates, on_device)
        self.is_torn = False

    def move_row(self, source: int, target: int) -> None:
        for store in self._stores.values():
            store[target] = store[source]

    def give_back(self, layers: Sequence[Any], rows: slice) -> None:
        """Lets transformers' layers hold the states of some rows."""
        for (index, name, number), state in self.shown_of(rows).items():
            with torch.inference_mode(False):
                copy = state.clone(memory_format=torch.contiguous_format)
            getattr(layers[index], name)[number] = copy

    def shown_of(self, rows: slice) -> dict[StatePlace, torch.Tensor]:
        """Views of the states of some rows, as layers have them."""
        return {place: self._as_shown(place, store[rows]) for place, store in self._stores.items()}

    def _as_shown(self, place: StatePlace, state: torch.Tensor) -> torch.Tensor:
        """A view of what is stored as layers have it."""
        if place[1] != CONVOLUTION:
            return state
        return state.mT.view(len(state), *self._shapes[place][:-1], state.shape[1])

    def clear(self, *, keeps_stores: bool) -> None:
        """Forgets all rows, and unless it `keeps_stores`, where their states were."""
        self.branches, self._shown, self._columns, self.is_torn = None, {}, {}, False
        if not keeps_stores:
            self._stores = {}
        for layer in self.layers.values():
            layer.conv_states.clear()
            layer.recurrent_states.clear()


def _turned(place: StatePlace, state: torch.Tensor) -> torch.Tensor:
    """The columns of a convolution (B, C, size), or (B, size), as (B, size, C); others as is."""
    if place[1] != CONVOLUTION:
        return state
    return state[:, None].mT if state.dim() == 2 else state.mT


def _new_store(like: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Zeros, which later calls may write to outside of inference mode."""
    with torch.inference_mode(False):
        return like.new_zeros(num_rows, *like.shape[1:])


def _formats(states: Mapping[StatePlace, torch.Tensor]) -> dict[StatePlace, Any]:
    """The shapes and dtypes of a row's states."""
    return {p: (state.shape[1:], state.dtype, state.device) for p, state in states.items()}


def _move_columns(
    states: Mapping[StatePlace, torch.Tensor], branches: Branches, paths: Paths
) -> None:
    """Lets the windows of convolutions follow paths."""
    number, width = paths.is_on.shape
    numbers: dict[int, torch.Tensor] = {}
    for place, update in branches.updates.items():
        if isinstance(update, StateUpdate):
            continue
        size = update.shape[1] - width
        if size not in numbers:
            rows, stays = (torch.arange(n, device=update.device) for n in (number, size))
            ends = branches.ancestry.windows(size)[rows, paths.last]
            ends = torch.where(paths.moves[:, None], ends, stays)
            numbers[size] = across_rows(ends, size + width).flatten()
        columns, window = update[:number].flatten(0, 1), states[place].flatten(0, 1)
        torch.index_select(columns, 0, numbers[size], out=window)


def _move_by_rules(
    states: Mapping[StatePlace, torch.Tensor],
    all_updates: Mapping[StatePlace, torch.Tensor | StateUpdate],
    paths: Paths,
) -> None:
    """Lets other states follow paths; small operations are done for all layers at once."""
    alike: dict[Any, dict[StatePlace, StateUpdate]] = {}
    for place, update in all_updates.items():
        if isinstance(update, StateUpdate):
            mine = StateUpdate(*(part[: len(paths.last)] for part in update))
            alike.setdefault(tuple(part.shape for part in mine), {})[place] = mine
    for group in alike.values():
        whole = along(StateUpdate(*map(torch.stack, zip(*group.values(), strict=True))), paths)
        for place, parts in zip(group, zip(*whole, strict=True), strict=True):
            move_on(states[place], StateUpdate(*parts))
