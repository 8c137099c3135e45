"""`load_streamed`: a model within a budget of memory, from a folder or the Hub."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from selfspec.errors import ConfigError, UnsupportedError, WeightsError
from selfspec.machine.memory import amount_in_bytes
from selfspec.run.streamed.budget import Sizes, choose_streamed, draft_model_bytes, text_bytes
from selfspec.run.streamed.buffers import CpuBuffers, CudaBuffers
from selfspec.run.streamed.checkpoint import Piece, find_files, open_shards, pieces_of
from selfspec.run.streamed.files import Shard
from selfspec.run.streamed.images import Image, Weight, copy_into, new_scratch
from selfspec.run.streamed.stream import Stream, attach_stream, blank

__all__ = ["load_streamed"]

_log = logging.getLogger("selfspec")

_Pieces = Mapping[str, Sequence[Piece]]


def load_streamed(
    name: str,
    *,
    max_memory: int | str,
    max_length: int = 2048,
    max_texts: int = 1,
    draft_model: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
) -> Any:
    """Loads a causal language model of which only a part lies in memory.

    Embeddings, norms, the output head and as many decoder layers as the budget allows are
    resident. The other layers are read from the model's safetensors files ahead of the forward,
    by a thread, round and round. It is an ordinary model of transformers otherwise: `generate()`
    works on it with and without `assistant=`. It can't be moved, cast, saved, copied or trained.

    Args:
        name: A folder, or the id of a model on the Hub, with safetensors files.
        max_memory: What weights, buffers, KV and forwards may take together: bytes, or text such
            as ``"2GB"``, ``"500MiB"`` or ``"25%"``, a share of what the whole model takes.
            If all fits, nothing is streamed.
        max_length: Of `max_memory`, room for a prompt and answer of this many tokens is set aside:
            for its KV, and for a forward that reads it at once. Longer texts work too, and take
            more memory.
        max_texts: The KV of this many such texts is set aside, which are decoded at the same time.
        draft_model: The small model that will draft for this one. What it takes is a part of
            `max_memory`, so that fewer layers of this model are resident.
        dtype: ``"auto"`` is the checkpoint's own. Any other is converted to while reading.
        device: Where the model computes. On a CUDA device, streamed layers come from pinned
            memory if that holds them.

    Raises:
        ConfigError: `max_memory` is none, or too small; the message names the least that would do.
        WeightsError: A file is missing, damaged or not of safetensors.
        UnsupportedError: Models of this kind can't be streamed.
    """
    start = perf_counter()
    name, device = str(name), _device(device)
    for what, number in {"max_length": max_length, "max_texts": max_texts}.items():
        if number < 1:
            raise ConfigError(f"{what} must be >= 1 (got {number})")
    shards = open_shards(find_files(name))
    try:
        model = _empty_model(name, dtype, shards)
        pieces = pieces_of(model, shards)
        layers = _Layers.of(model, pieces)
        sizes = layers.sizes(model, max_length, max_texts)
        budget = amount_in_bytes(max_memory, sizes.whole)
        if draft_model is not None:
            sizes = sizes.beside(draft_model_bytes(draft_model, max_length, max_texts))
        streamed = choose_streamed(sizes, layers.may_stream, budget)
        _load(model, pieces, {n for i in streamed for n in layers.weights[i]}, device)
        if streamed:
            _stream(model, layers, streamed, shards, device)
    except BaseException:
        _close(shards)
        raise
    if not streamed:
        _close(shards)
    _log.info(
        "%d of %d layers are streamed; %.0f MB of %.0f MB are used (loaded in %.2f s)",
        *(len(streamed), len(layers.modules)),
        *(sizes.with_streamed(streamed) / 1e6, budget / 1e6, perf_counter() - start),
    )
    return model


def _device(name: str | torch.device) -> torch.device:
    """The device, on which torch must be able to put a tensor."""
    rule = "device must be a CPU or a CUDA device that torch can use here"
    try:
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            torch.empty(0, device=device)
            return device
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(f"{rule} (got {str(name)!r}: {str(error).splitlines()[0]})") from error
    raise ConfigError(f"{rule} (got {str(name)!r})")


class _Layers(NamedTuple):
    """The decoder's layers, and how each of them lies in a buffer."""

    decoder: nn.Module  # runs the layers
    names: list[str]
    modules: list[nn.Module]
    weights: list[dict[str, nn.Parameter]]  # of each layer, by their names in the model
    images: list[Image]
    may_stream: list[int]  # layers that share no weight with others

    @classmethod
    def of(cls, model: Any, pieces: _Pieces) -> _Layers:
        """Takes the list of modules that holds most of the weights for the decoder's layers."""
        lists = [item for item in model.named_modules() if isinstance(item[1], nn.ModuleList)]
        if not lists:
            raise UnsupportedError(
                f"{type(model).__name__} has no list of layers to stream; load it with "
                "from_pretrained()"
            )
        prefix, found = max(lists, key=lambda item: _num_bytes(item[1]))
        names = [f"{prefix}.{index}" for index in range(len(found))]
        weights = [
            {f"{name}.{inner}": weight for inner, weight in module.named_parameters()}
            for name, module in zip(names, found, strict=True)
        ]
        missing = [name for layer in weights for name in layer if name not in pieces]
        _check_complete(missing)
        images = [Image([_weight(w, pieces[name]) for name, w in each.items()]) for each in weights]
        owners: dict[int, set[str]] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(weight), set()).add(name)
        alone = [
            index
            for index, layer in enumerate(weights)
            if layer and all(len(owners[id(weight)]) == 1 for weight in layer.values())
        ]
        decoder = model.get_submodule(prefix.rpartition(".")[0])
        return cls(decoder, names, list(found), weights, images, alone)

    def sizes(self, model: Any, max_length: int, max_texts: int) -> Sizes:
        """What all parts take, in bytes, with room for this many texts of this many tokens."""
        config = model.config.get_text_config(decoder=True)
        reserve = text_bytes(config, max_length, model.dtype.itemsize, max_texts)
        layers = [_num_bytes(module) for module in self.modules]
        return Sizes(
            _num_bytes(model) - sum(layers) + reserve,
            layers,
            [image.num_bytes for image in self.images],
            max(image.scratch_bytes for image in self.images),
        )


def _empty_model(name: str, dtype: str | torch.dtype, shards: Sequence[Shard]) -> Any:
    """The model with its buffers, and weights that have a shape and no values."""
    if importlib.util.find_spec("accelerate") is None:
        raise UnsupportedError("load_streamed() needs accelerate; run 'pip install accelerate'")
    from accelerate import init_empty_weights

    config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"a quantised model can't be streamed (got {name!r}); name its original weights"
        )
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype, config, shards))
    model.tie_weights()  # In that context each weight became one of its own.
    _keep_in_float32(model)
    with contextlib.suppress(OSError):  # Without a file, it follows from the model's config.
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model.eval().requires_grad_(False)


def _dtype(dtype: str | torch.dtype, config: Any, shards: Sequence[Shard]) -> torch.dtype:
    """The dtype that is asked for, else the config's, else that of the files."""
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, dtype)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if dtype != "auto":
        raise ConfigError(f"dtype must be one of torch's for floats, or 'auto' (got {dtype!r})")
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    stored = (tensor.dtype for shard in shards for tensor in shard.tensors.values())
    return next((each for each in stored if each.is_floating_point), torch.float32)


def _keep_in_float32(model: Any) -> None:
    """Gives float32 to the weights for which their model insists on it, as loading them does."""
    kept = list(model._get_dtype_plan(model.dtype))
    for name, weight in model.named_parameters():
        if any(part in name for part in kept):
            weight.data = weight.data.float()


def _stream(
    model: Any,
    layers: _Layers,
    streamed: Sequence[int],
    shards: Sequence[Shard],
    device: torch.device,
) -> None:
    """Lets layers have their weights in turn, and notes where the parts of the model are."""
    weights = [
        [_put(model, name, blank(weight, device)) for name, weight in layers.weights[index].items()]
        for index in streamed
    ]
    images, on_cuda = [layers.images[index] for index in streamed], device.type == "cuda"
    buffers = CudaBuffers(images, shards, device) if on_cuda else CpuBuffers(images, shards)
    stream = Stream(weights, buffers)
    attach_stream(model, layers.decoder, [layers.modules[index] for index in streamed], stream)
    where = "cpu" if on_cuda else "disk"
    # As accelerate notes it, so that transformers does not move or compile the model.
    model.hf_device_map = {"": str(device)} | {layers.names[index]: where for index in streamed}


def _load(model: Any, pieces: _Pieces, later: set[str], device: torch.device) -> None:
    """Reads all weights but those of `later`, and ties what is tied."""
    scratch, loaded = new_scratch(), set(later)
    for name, empty in model.state_dict(keep_vars=True).items():
        if name in pieces and name not in later:
            full = torch.empty(empty.shape, dtype=empty.dtype, device=device)
            copy_into(full, pieces[name], scratch)
            _put(model, name, full)
            loaded.add(name)
    missing = {name for name, _ in model.named_parameters(remove_duplicate=False)} - loaded
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for name, buffer in list(model.named_buffers()):
        _put(model, name, buffer.to(device))
    named = model.named_parameters(remove_duplicate=False)
    _check_complete([name for name, each in named if each.is_meta and name not in later])


def _put(model: Any, name: str, tensor: torch.Tensor) -> Any:
    """Sets a buffer or a weight of the model; returns what it has now."""
    prefix, _, leaf = name.rpartition(".")
    module = model.get_submodule(prefix)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    return getattr(module, leaf)


def _weight(empty: nn.Parameter, pieces: Sequence[Piece]) -> Weight:
    return Weight(empty.dtype, tuple(empty.shape), pieces)


def _check_complete(missing: Sequence[str]) -> None:
    """Refuses files that lack weights."""
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(
            f"the files must hold all weights of the model (they lack {missing[0]!r}{more}); "
            "download the model again"
        )


def _num_bytes(module: nn.Module) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _close(shards: Sequence[Shard]) -> None:
    for shard in shards:
        shard.close()
