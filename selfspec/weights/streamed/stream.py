"""The hooks that give streamed layers their weights, and what a streamed model refuses.

A streamed weight reads as NaN except while its layer is computed.
Knows modules and the reader; nothing of files.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from selfspec.compat.modules import MOVES
from selfspec.errors import UnsupportedError
from selfspec.weights.held_weight import HeldWeight, set_data
from selfspec.weights.streamed.layer_weights import Buffers
from selfspec.weights.streamed.reader import Reader

STREAMED = (
    "the weights of a streamed model can't be written, trained or compiled, nor adapters be merged "
    "into them: each forward has what the files hold; edit the model and save it, or load it "
    "without max_memory"
)

_STREAM = "selfspec_stream"  # Where a streamed model has its `Stream`.
_CANT_SAVE = "a streamed model holds only a part of its weights, which its files hold whole"
_REFUSED = {
    MOVES: "a streamed model can't be moved or cast; name dtype= to load()",
    "push_to_hub": f"{_CANT_SAVE}; push those",
    "save_pretrained": f"{_CANT_SAVE}; copy those",
    "state_dict": f"{_CANT_SAVE}; read those",
}


class FileWeight(HeldWeight):
    """A streamed weight: it has its values only while its layer computes, and reads as NaN else."""

    kept = STREAMED


class Place(NamedTuple):
    """Where a tensor of a layer goes when it is read, and the blank one that is there before."""

    put: Callable[[torch.Tensor], None]
    blank: torch.Tensor

    @classmethod
    def of(cls, weight: nn.Parameter) -> Place:
        """The place of a weight that is `blank`."""
        empty = weight.data
        weight.__class__ = FileWeight
        return cls(functools.partial(set_data, weight), empty)


class Stream:
    """Gives a streamed layer of one model its weights when its turn comes.

    `layers` has the places of the tensors of all of them.
    """

    def __init__(self, layers: Sequence[Sequence[Place]], buffers: Buffers) -> None:
        self._layers = layers
        self._views = [buffers.views(index) for index in range(len(layers))]
        self._blanks = [[place.blank for place in layer] for layer in layers]
        self.lock = threading.RLock()
        self._taken: int | None = None  # The layer that has its weights now.
        self.reader = Reader(buffers, len(layers))
        weakref.finalize(self, self.reader.close)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError("a streamed model can't be copied or pickled; load it again")

    def take(self, index: int) -> None:
        """Gives a layer its weights, as soon as they are read."""
        self.end()
        buffer = self.reader.take(index)
        self._taken = index
        self._point(index, self._views[index][buffer])

    def give_back(self, index: int) -> None:
        """Takes the weights from a layer, whose buffer may then be filled again."""
        self._point(index, self._blanks[index])
        self._taken = None
        self.reader.give_back()

    def end(self) -> None:
        """Takes the weights from the layer in which a forward has broken off, if it has."""
        if self._taken is not None:
            self.give_back(self._taken)

    def _point(self, index: int, tensors: Sequence[torch.Tensor]) -> None:
        for place, tensor in zip(self._layers[index], tensors, strict=True):
            place.put(tensor)


@dataclass(frozen=True)
class _Hook:
    """Called before or after the forward of a streamed layer.

    A forward may break off after any layer. The next one takes the first layer again.
    """

    stream: Stream
    act: Callable[[int], None]
    number: int  # of the layer, among the streamed ones

    def __call__(self, *_args: object) -> None:
        self.act(self.number)


def attach_stream(
    model: nn.Module, decoder: nn.Module, layers: Sequence[nn.Module], stream: Stream
) -> None:
    """Lets the stream serve these layers of the decoder, in that order."""
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(_Hook(stream, stream.take, index))
        layer.register_forward_hook(_Hook(stream, stream.give_back, index))
    vars(model)[_STREAM] = stream
    vars(decoder)["forward"] = _one_at_a_time(decoder, stream)
    for module in (model, decoder):
        vars(module).update((name, _Refusal(reason)) for name, reason in _REFUSED.items())


def blank(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape that takes no memory and reads as NaN, so that mistakes show."""
    value = float("nan") if weight.is_floating_point() else 0
    return torch.full((), value, dtype=weight.dtype, device="cpu").expand(weight.shape)


def stream_of(model: nn.Module) -> Stream | None:
    """The `Stream` that feeds a model's streamed layers; None if none are streamed."""
    return vars(model).get(_STREAM)


def is_streamed(model: nn.Module) -> bool:
    return stream_of(model) is not None


class _Refusal(NamedTuple):
    reason: str

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise UnsupportedError(self.reason)


def _one_at_a_time(module: nn.Module, stream: Stream) -> Any:
    """The module's forward, for one thread at a time; keeps no reference to the module.

    Wherever it breaks off, no layer is left with weights that will be read over.
    """
    forward, owner = type(module).forward, weakref.ref(module)

    @functools.wraps(forward)
    def locked_forward(*args: Any, **kwargs: Any) -> Any:
        with stream.lock:
            try:
                output = forward(owner(), *args, **kwargs)
            finally:
                stream.end()
        if output[0].requires_grad:
            raise UnsupportedError(
                "a streamed model can't compute gradients: the weights that they need are gone by "
                "then; load it without max_memory"
            )
        return output

    locked_forward.__module__ = __name__  # Trials would take it for a user's code.
    locked_forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return locked_forward
