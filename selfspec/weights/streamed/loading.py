"""Loads a model within a budget of memory, from a folder or the Hub."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from math import prod
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from selfspec.compat.checkpoints import names_in_float32, parts_of
from selfspec.errors import UnsupportedError, WeightsError
from selfspec.machine.memory import amount_in_bytes
from selfspec.weights.held_weight import hold
from selfspec.weights.rounded import RoundedMatrix, matrix_of
from selfspec.weights.rounded_model import KEPT, attend_exactly, bytes_of_rounded
from selfspec.weights.streamed.files import Shard, StoredTensor, check_complete, find_files
from selfspec.weights.streamed.layer_weights import (
    Buffers,
    LayerWeights,
    Weight,
    new_scratch,
    read_into,
)
from selfspec.weights.streamed.memory_plan import (
    Sizes,
    choose_streamed,
    copy_pays,
    draft_model_bytes,
    text_bytes,
)
from selfspec.weights.streamed.rounded_file import Stored, is_rounded, plan_rounded, rounded_file
from selfspec.weights.streamed.stream import STREAMED, Place, Stream, attach_stream, blank

_log = logging.getLogger("selfspec")

_HAS_COPY = "selfspec_has_copy"  # Where a model says whether a rounded copy has room beside it.


def load_within(
    name: str,
    max_memory: int | str,
    *,
    max_length: int,
    max_texts: int,
    draft_model: PreTrainedModel | str | None,
    dtype: str | torch.dtype,
    bits: int | None = None,
) -> PreTrainedModel:
    """`selfspec.load()` with a budget of memory."""
    start = perf_counter()
    with ExitStack() as opened:
        shards = [opened.enter_context(closing(Shard(path))) for path in find_files(name)]
        model = _empty_model(name, dtype, shards)
        stored = original = _stored(model, shards)
        if bits is not None:
            attend_exactly(model)
            stored = plan_rounded(model, original, bits)
        layers = _layers_of(model, stored)
        sizes = _sizes(model, layers, stored, text_bytes(model, max_length, max_texts))
        budget, streamable = amount_in_bytes(max_memory, sizes.whole), _streamable(model, layers)
        if isinstance(draft_model, str):
            copies = [bytes_of_rounded(layer.module, int(draft_model[-1])) for layer in layers]
            head = bytes_of_rounded(model.get_output_embeddings(), 8)
            beside = sizes._replace(rounded=copies, rounded_head=head)
            has_copy = copy_pays(beside, streamable, budget)
            vars(model)[_HAS_COPY] = has_copy
            sizes = beside if has_copy else sizes
        elif draft_model is not None:
            more = draft_model_bytes(draft_model, max_length, max_texts)
            sizes = sizes._replace(fixed=sizes.fixed + more)
        chosen = choose_streamed(sizes, streamable, budget)
        if bits is not None:
            path = rounded_file(stored, original, shards)
            opened.close()
            shards = [opened.enter_context(closing(Shard(path)))]
            stored = {
                weight: [tensor._replace(shard=shards[0]) for tensor in tensors]
                for weight, tensors in stored.items()
            }
            layers = _layers_of(model, stored)
        streamed = [layers[index] for index in chosen]
        _load(model, stored, {name for layer in streamed for name in layer.weights})
        if streamed:
            _stream(model, streamed, stored, shards)
            opened.pop_all()  # The files stay open; the reader closes them.
    _log.info(
        "%d of %d layers are streamed; %.0f MB of %.0f MB are used (loaded in %.2f s)",
        len(streamed),
        len(layers),
        sizes.with_streamed(chosen) / 1e6,
        budget / 1e6,
        perf_counter() - start,
    )
    return model


def may_have_copy(model: nn.Module) -> bool:
    """False if resident layers have the place of the model's rounded copy, which is faster."""
    return bool(vars(model).get(_HAS_COPY, True))


class _Layer(NamedTuple):
    """A layer of the decoder, and how it is read into a buffer."""

    name: str
    module: nn.Module
    weights: dict[str, nn.Parameter]  # by their names in the model
    stored: LayerWeights

    @classmethod
    def of(cls, name: str, module: nn.Module, stored: Stored) -> _Layer:
        weights = {f"{name}.{inner}": weight for inner, weight in module.named_parameters()}
        check_complete([inner for inner in weights if inner not in stored])
        parts = [part for n, weight in weights.items() for part in _parts(weight, stored[n])]
        return cls(name, module, weights, LayerWeights(parts))


def _layers_of(model: PreTrainedModel, stored: Stored) -> list[_Layer]:
    """The decoder's layers: the list of modules that holds the most weights."""
    lists = [item for item in model.named_modules() if isinstance(item[1], nn.ModuleList)]
    if not lists:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of layers to stream; load it with "
            "from_pretrained()"
        )
    prefix, modules = max(lists, key=lambda item: sum(x.nbytes for x in item[1].parameters()))
    return [_Layer.of(f"{prefix}.{index}", module, stored) for index, module in enumerate(modules)]


def _sizes(
    model: PreTrainedModel, layers: Sequence[_Layer], stored: Stored, num_bytes_of_texts: int
) -> Sizes:
    """Bytes of all parts."""
    resident = [_bytes_in_memory(layer.weights, stored) for layer in layers]
    whole = _bytes_in_memory(dict(model.named_parameters()), stored)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return Sizes(
        whole + buffers - sum(resident) + num_bytes_of_texts,
        resident,
        [layer.stored.num_bytes for layer in layers],
        max(layer.stored.scratch_bytes for layer in layers),
    )


def _streamable(model: PreTrainedModel, layers: Sequence[_Layer]) -> list[int]:
    """The layers that have weights and share none."""
    names = model.named_parameters(remove_duplicate=False)
    owners = Counter(id(weight) for _, weight in names)
    return [
        index
        for index, layer in enumerate(layers)
        if layer.weights and all(owners[id(weight)] == 1 for weight in layer.weights.values())
    ]


def _empty_model(source: str, dtype: str | torch.dtype, shards: Sequence[Shard]) -> PreTrainedModel:
    """The model, with weights that have a shape and no values."""
    if importlib.util.find_spec("accelerate") is None:
        raise UnsupportedError("max_memory needs accelerate; run 'pip install accelerate'")
    from accelerate import init_empty_weights

    config = AutoConfig.from_pretrained(source)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"a quantised model can't be streamed (got {source!r}); name its original weights"
        )
    if dtype == "auto":  # The config's, else that of the files.
        stored = (tensor.dtype for shard in shards for tensor in shard.tensors.values())
        dtype = config.dtype or next((t for t in stored if t.is_floating_point), torch.float32)
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # In that context, no two modules share a weight.
    in_float32 = names_in_float32(model)
    for name, weight in model.named_parameters():
        if any(part in name for part in in_float32):  # As in `from_pretrained()`
            weight.data = weight.data.float()
    with suppress(OSError):  # Without a file, the model has made one from its config.
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model.eval().requires_grad_(False)


def _stored(model: PreTrainedModel, shards: Sequence[Shard]) -> Stored:
    """The tensors in the files that make the weights of the model."""
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    stored = {
        name: [tensors[part.name].part(part.which, part.number) for part in parts]
        for name, parts in parts_of(model, tensors).items()
    }
    for name, weight in model.state_dict().items():
        shapes = [tensor.shape for tensor in stored.get(name, ())]
        is_filled = sum(map(prod, shapes)) == weight.numel()
        if shapes and not (shapes[0] == weight.shape if len(shapes) == 1 else is_filled):
            raise WeightsError(
                f"{name} must have shape {tuple(weight.shape)}, as the model's config says (got "
                f"{shapes} in {stored[name][0].shard.path}); use the config that belongs to the "
                "weights"
            )
    return stored


def _stream(
    model: PreTrainedModel, layers: Sequence[_Layer], stored: Stored, shards: Sequence[Shard]
) -> None:
    """Gives these layers their hooks, and notes where the parts of the model are."""
    places = [
        [place for name in layer.weights for place in _places(model, name, stored[name])]
        for layer in layers
    ]
    stream = Stream(places, Buffers([layer.stored for layer in layers], shards))
    name_of_list = layers[0].name.rpartition(".")[0]
    decoder = model.get_submodule(name_of_list.rpartition(".")[0])
    attach_stream(model, decoder, [layer.module for layer in layers], stream)
    # Accelerate's note, which keeps transformers from moving or compiling the model.
    model.hf_device_map = {"": "cpu"} | {layer.name: "disk" for layer in layers}


def _parts(weight: torch.Tensor, tensors: Sequence[StoredTensor]) -> list[Weight]:
    """The tensors to read for a weight: its values, or rounded numbers and their scales."""
    if is_rounded(tensors):
        return [Weight(tensor.dtype, tensor.shape, [tensor]) for tensor in tensors]
    return [Weight(weight.dtype, tuple(weight.shape), tensors)]


def _places(model: PreTrainedModel, name: str, tensors: Sequence[StoredTensor]) -> list[Place]:
    """Where what is read for a weight goes. The weight is blank until then."""
    weight = model.get_parameter(name)
    if not is_rounded(tensors):
        return [Place.of(weight)]
    blanks = [
        torch.zeros((), dtype=part.dtype, device="cpu").expand(part.shape) for part in tensors
    ]
    matrix = matrix_of(blanks[0], blanks[1] + torch.nan)
    hold(weight, matrix, STREAMED)
    parts = {"numbers": matrix.numbers, "scales": matrix.scales}
    return [Place(partial(setattr, matrix, part), empty) for part, empty in parts.items()]


def _load(model: PreTrainedModel, stored: Stored, later: set[str]) -> None:
    """Reads all weights and ties those that the model wants tied.

    Those named in `later` stay blank.
    """
    scratch, values, rounded = new_scratch(), dict[str, torch.Tensor](), dict[str, RoundedMatrix]()
    for name, empty in model.state_dict().items():
        if name in stored:
            values[name] = blank(empty)
        if name in stored and name not in later:
            read = []
            for part in _parts(empty, stored[name]):
                read.append(torch.empty(part.shape, dtype=part.dtype, device="cpu"))
                read_into(read[-1], part.tensors, scratch)
            if len(read) == 1:
                values[name] = read[0]
            else:
                rounded[name] = matrix_of(*read)
    missing = model.load_state_dict(values, strict=False, assign=True).missing_keys
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    check_complete([name for name, weight in model.named_parameters() if weight.is_meta])
    for name, matrix in rounded.items():
        hold(model.get_parameter(name), matrix, KEPT)


def _bytes_in_memory(weights: Mapping[str, nn.Parameter], stored: Stored) -> int:
    """Bytes of weights in memory; one that several modules share counts once."""
    return sum(
        sum(part.num_bytes for part in stored[name])
        if is_rounded(stored.get(name, ()))
        else weight.nbytes
        for name, weight in weights.items()
    )
