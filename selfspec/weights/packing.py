"""Packs the weights of a model in place, if timing a few products shows that this pays.

A packed weight is given back to whoever reads, trains, moves, saves or merges it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from selfspec.compat.modules import encoder_of, is_compiled
from selfspec.machine.memory import return_freed_memory
from selfspec.weights.formats import PackedMatrix, Packer, packer_for
from selfspec.weights.held_weight import HeldWeight, PackedWeight, give_back, hold

_log = logging.getLogger("selfspec")

_LEAST_WEIGHTS = 1 << 16  # In a smaller layer, the call costs more than the product.
_SHOWN = 2.0  # After this many seconds, a progress bar is shown.
_AT_ONCE = 1 << 25  # About this many weights are packed between two updates of the bar.
# This many weights are timed. They leave the CPU's cache before they are used again. At most an
# eighth of them is of one layer, so that several shapes are among them.
_SAMPLE, _PART = 1 << 23, 1 << 20
_ROUNDS = 3
# Packing pays if it cuts the time of products by at least 10 %. A single token may take at most
# 25 % longer, since plain calls compute from packed weights, too. In bfloat16 under AVX2 it took
# 24 % longer, and eight tokens a fifth.
_PAYS, _MOST_OF_PLAIN = 0.9, 1.25

_packing = threading.Lock()
_tried: WeakSet[nn.Module] = WeakSet()  # Models that somebody has asked to be packed.


class _WithRows:
    """A packed matrix, and the weight itself, of which an embedding reads rows."""

    def __init__(self, matrix: PackedMatrix, weight: torch.Tensor) -> None:
        is_part_of_file = weight.untyped_storage().nbytes() > weight.nbytes
        self._weight = weight.clone() if is_part_of_file else weight
        self._matrix = matrix

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._matrix(x, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._weight[ids]

    def unpacked(self) -> torch.Tensor:
        return self._weight


def pack_loaded(model: PreTrainedModel, refusal: str | None, *, may_copy: bool) -> None:
    """Packs the weights of a model that was just loaded, and that nobody else has yet."""
    if pack(model, refusal, may_copy=may_copy) is None and may_copy:
        # While one weight is a view of a file, all of it may be held.
        for weight in model.parameters():
            if type(weight) is nn.Parameter and weight.device.type == "cpu":
                weight.data = weight.data.clone()
    return_freed_memory()


@torch.no_grad()
def pack(model: nn.Module, refusal: str | None = None, *, may_copy: bool = True) -> str | None:
    """Packs the linear layers of a model in place; returns why none of them is, or None.

    With a `refusal`, a message, they are never given back. The output head is left out then, since
    code that reads its rows could not make it an ordinary weight again. A weight that an embedding
    shares is packed too if it `may_copy` it, since the embedding reads rows of the weight itself.
    """
    _tried.add(model)
    with _packing, torch.inference_mode(False):
        layers = linears_of(model)
        weights = _packable(model, layers, may_copy=may_copy)
        if refusal is not None:
            head = getattr(model, "get_output_embeddings", lambda: None)()
            weights = [weight for weight in weights if weight is not getattr(head, "weight", None)]
        if any(type(layer.weight) is PackedWeight for layer in layers) and not weights:
            return None
        if not weights:
            return _why_none(model, layers)
        packer = packer_for(weights[0].dtype)
        assert packer is not None
        # What looks slow beside another program gets a second chance.
        if not any(_pays(packer, weights) for _ in range(2)):
            return "timing a few of its layers shows that packing does not pay on this machine"
        of_embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        num_packed = 0
        for part in _in_parts(weights):
            num_packed += _pack_part(part, packer, of_embeddings, refusal)
            return_freed_memory()  # The allocator would keep a part of it as long as the process.
    return None if num_packed else "its weights don't come back bit by bit from a packed format"


def _pays(packer: Packer, weights: Sequence[torch.Tensor]) -> bool:
    """Are products with one token and with eight faster, and that with one not much slower?"""
    sample: list[torch.Tensor] = []
    for weight in weights:
        if sum(part.numel() for part in sample) < _SAMPLE:
            sample.append(weight.detach()[: max(_PART // weight.shape[1], 1)])
    matrices, plain = packer(sample), [partial(linear, weight=weight) for weight in sample]
    if None in matrices:  # A weight that is not finite can't be packed.
        return False
    times = []
    for num_tokens in (1, 8):
        inputs = [weight.new_ones(num_tokens, weight.shape[1]) for weight in sample]
        rounds = [(_seconds(plain, inputs), _seconds(matrices, inputs)) for _ in range(_ROUNDS)]
        times.append([min(seconds) for seconds in zip(*rounds, strict=True)])
    (plain_one, packed_one), (plain_eight, packed_eight) = times
    is_faster = packed_one + packed_eight <= _PAYS * (plain_one + plain_eight)
    return bool(is_faster and packed_one <= _MOST_OF_PLAIN * plain_one)


def _seconds(products: Sequence[Any], inputs: Sequence[torch.Tensor]) -> float:
    """The time of all layers in a row."""
    start = perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product(x, bias=None)
    return perf_counter() - start


def _pack_part(
    weights: Sequence[nn.Parameter],
    packer: Packer,
    of_embeddings: Container[int],
    refusal: str | None,
) -> int:
    """Packs weights that come back bit by bit; returns how many there were."""
    num_packed, values = 0, [weight.detach() for weight in weights]
    for weight, value, matrix in zip(weights, values, packer(values), strict=True):
        if matrix is not None and torch.equal(matrix.unpacked(), value):
            has_rows = id(weight) in of_embeddings
            hold(weight, _WithRows(matrix, value) if has_rows else matrix, refusal)
            num_packed += 1
    return num_packed


def unpack(model: nn.Module) -> None:
    """Gives back all weights of a model that are packed and not kept so."""
    for weight in model.parameters():
        if type(weight) is PackedWeight:
            give_back(weight, is_wanted=True)


def is_packed_in_place(module: nn.Module) -> bool:
    return type(getattr(module, "weight", None)) is PackedWeight


def may_be_packed(model: nn.Module, layers: Sequence[nn.Linear]) -> bool:
    """Could packing some of its layers make a model faster, which nobody has tried yet?"""
    return model not in _tried and any(map(_can_be_packed, layers))


def linears_of(model: nn.Module, modules: Iterable[nn.Module] | None = None) -> list[nn.Linear]:
    """The plain linear layers among all modules of a model; none if the model is compiled.

    Leaves out quantised layers, layers whose `forward` other code has replaced, and those of an
    encoder, which no step runs.
    """
    encoder = encoder_of(model)
    linears, unused = [], set() if encoder is None else set(encoder.modules())
    for module in model.modules() if modules is None else modules:
        if is_compiled(module):
            return []
        if type(module) is nn.Linear and "forward" not in vars(module) and module not in unused:
            linears.append(module)
    return linears


def _packable(
    model: nn.Module, layers: Sequence[nn.Linear], *, may_copy: bool
) -> list[nn.Parameter]:
    """The weights that torch can pack, of the dtype that most of them have.

    Leaves out a weight of modules that are neither linear layers nor embeddings, and one that lies
    in the memory of another, through which it could be written unseen.
    """
    of_layers: dict[int, Any] = {id(x.weight): x.weight for x in layers if _can_be_packed(x)}
    users: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            users[id(weight)].append(module)
    known, overlapping = {*layers}, _overlapping(model)
    possible = [
        weight
        for key, weight in of_layers.items()
        if key not in overlapping
        and all(u in known or (may_copy and isinstance(u, nn.Embedding)) for u in users[key])
    ]
    dtypes = Counter(weight.dtype for weight in possible)
    dtype = max(dtypes, key=lambda dtype: dtypes[dtype], default=None)
    return [weight for weight in possible if weight.dtype is dtype]


def _can_be_packed(module: nn.Linear) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and weight.device.type == "cpu"
        and weight.numel() >= _LEAST_WEIGHTS
        and packer_for(weight.dtype) is not None
    )


def _overlapping(model: nn.Module) -> set[int]:
    """The ids of weights and buffers that share memory with others, as views of one tensor do."""
    tensors = filter(_has_address, chain(model.parameters(), model.buffers()))
    spans = sorted((*_span_of(tensor), id(tensor)) for tensor in tensors)
    shared: set[int] = set()
    longest, last = 0, 0
    for start, end, key in spans:
        if start < longest:
            shared |= {key, last}
        if end > longest:
            longest, last = end, key
    return shared


def _has_address(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and tensor.device.type == "cpu" and tensor.numel() > 0


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    num_spanned = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + num_spanned * tensor.element_size()


def _why_none(model: nn.Module, layers: Sequence[nn.Linear]) -> str:
    """Why none of a model's layers can be packed."""
    if any(map(is_compiled, model.modules())):
        return "it is compiled, and compiled code reads the weights themselves"
    weights = (layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter))
    large = [weight for weight in weights if weight.numel() >= _LEAST_WEIGHTS]
    if not large:
        return "no large layer is torch's own nn.Linear, as in quantised or offloaded models"
    if any(isinstance(weight, HeldWeight) for weight in large):
        return "its weights are held in another way already"
    if device := next((w.device for w in large if w.device.type != "cpu"), None):
        return f"packed weights are for a CPU (got device {str(device)!r})"
    if dtype := next((w.dtype for w in large if packer_for(w.dtype) is None), None):
        return f"torch has no packed products of {dtype} for this processor"
    return "its weights are not contiguous, or other modules or tensors share their memory"


def _in_parts(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The weights in parts of about as many as are packed at once.

    A bar shows how many were packed, if that takes long.
    """
    start, num_bytes = perf_counter(), sum(weight.nbytes for weight in weights)
    options = {"unit": "B", "unit_scale": True, "delay": _SHOWN}
    with hf_logging.tqdm(total=num_bytes, desc="Packing weights", **options) as bar:
        part: list[nn.Parameter] = []
        for weight in weights:
            part.append(weight)
            if sum(w.numel() for w in part) >= _AT_ONCE or weight is weights[-1]:
                num_of_part = sum(w.nbytes for w in part)
                yield part
                bar.update(num_of_part)
                part = []
    _log.info("packed %.0f MB of weights in %.2f s", num_bytes / 1e6, perf_counter() - start)
