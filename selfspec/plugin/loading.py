"""`load`: a model that only generates, held in as little memory as that takes."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from selfspec.errors import ConfigError, UnsupportedError, one_line, shown, unknown_name
from selfspec.machine.hub import check_model_name
from selfspec.plugin.attach import attach
from selfspec.weights.packing import pack_loaded
from selfspec.weights.rounded import BITS, rounding_reason
from selfspec.weights.rounded_model import round_model
from selfspec.weights.streamed.files import check_complete
from selfspec.weights.streamed.loading import load_within
from selfspec.weights.streamed.stream import STREAMED, is_streamed

# What stands for an option of `from_pretrained()` here.
_OPTIONS_OF_TRANSFORMERS = {
    "torch_dtype": "dtype=",
    "device_map": "device=",
    "load_in_8bit": "weights='int8'",
    "load_in_4bit": "weights='int4'",
    "quantization_config": "weights=",
}


def load(
    name: str | Path,
    max_memory: int | str | None = None,
    *,
    max_length: int = 2048,
    max_texts: int = 1,
    draft_model: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    weights: str | None = None,
    sees: bool = False,
    **others: Any,
) -> Any:
    """Loads a causal language model for generating, attached.

    It is the model that `AutoModelForCausalLM.from_pretrained()` loads, without gradients. On a CPU
    its linear layers are packed in place, if timing a few of them shows that this makes them
    faster. So the model takes as much memory as its weights. Code that reads packed weights gets
    them back, and from then on the model is packed no more.

    With `max_memory`, embeddings, norms and the output head are resident, and the decoder layers
    that the budget still holds. The other layers are *streamed*: a thread reads them again for each
    forward, ahead of it, from the model's safetensors files. A streamed model can't be moved, cast,
    saved, copied or trained, and its weights can't be written.

    With `weights="int8"` or `"int4"`, its linear layers get 8 or 4 bits; the embedding and the
    output head get 8 in both. All else computes in `dtype`, where ``"auto"`` is float32. The page
    "Rounded weights" says what that costs in quality.

    Args:
        name: A folder, or the id of a model on the Hub.
        max_memory: What weights, buffers, KV and forwards may take together: bytes, or text such
            as ``"2GB"``, ``"500MiB"`` or ``"25%"``, a share of what the whole model takes.
            If all fits, nothing is streamed.
        max_length: A part of `max_memory` is set aside for a prompt and answer of this many tokens.
            Longer texts work too, and take more memory.
        max_texts: For how many such texts at the same time it is set aside.
        draft_model: The small model that will draft, and takes a part of `max_memory`.
        dtype: ``"auto"`` is the checkpoint's own.
        device: Where the model computes; ``"auto"`` is a GPU if there is one. Within `max_memory`
            it is a CPU.
        weights: ``"int8"`` or ``"int4"``: rounded, on a CPU; None: as the checkpoint has
            them. Within `max_memory`, they are first written to the user's cache folder, once.
        sees: Load a model that reads images with what it reads them with; not within `max_memory`.
    """
    if not isinstance(name, (str, Path)):
        raise ConfigError(
            f"name must be a folder or a Hub id (got {shown(name)}); a model that is loaded needs "
            "no load(): call selfspec.attach(model)"
        )
    for option in others:
        if option not in _OPTIONS_OF_TRANSFORMERS:
            raise ConfigError(unknown_name("option", option, signature(load).parameters))
        raise ConfigError(
            f"load() takes no {option}= (got {shown(others[option])}); use "
            f"{_OPTIONS_OF_TRANSFORMERS[option]}, or load the model by transformers and call "
            "selfspec.attach(model)"
        )
    check_model_name(str(name), "name")
    source, target, wanted = str(name), _device(device), _dtype(dtype)
    for what, number in {"max_length": max_length, "max_texts": max_texts}.items():
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"{what} must be a whole number >= 1 (got {number!r})")
    if target.type != "cpu" and (max_memory is not None or weights is not None):
        raise ConfigError(
            f"max_memory and weights are for a CPU (got device={str(target)!r}); name "
            "device='cpu', or leave them out and let accelerate offload the model, by "
            "device_map='auto' of from_pretrained()"
        )
    if sees and max_memory is not None:
        raise ConfigError(
            "sees=True and max_memory exclude each other: what reads images can't be streamed; "
            "leave one out"
        )
    bits = None
    if weights is not None:
        bits = _checked_bits(weights)
        wanted = torch.float32 if wanted == "auto" else wanted
    if max_memory is not None:
        AutoConfig.from_pretrained(source)  # Raises a clear error for a wrong name.
        model = load_within(
            source,
            max_memory,
            max_length=max_length,
            max_texts=max_texts,
            draft_model=draft_model,
            bits=bits,
            dtype=wanted,
        )
    elif bits is not None:
        return attach(_load_rounded(source, bits, wanted, sees=sees))
    else:
        model = load_whole(source, dtype=wanted, device=target, sees=sees).requires_grad_(False)
    refusal = STREAMED if is_streamed(model) else None
    pack_loaded(model, refusal, may_copy=max_memory is None)
    return attach(model)


def _checked_bits(weights: str) -> int:
    if weights not in BITS:
        raise ConfigError(f"weights must be 'int8', 'int4' or left out (got {shown(weights)})")
    if (reason := rounding_reason(BITS[weights])) is not None:
        raise UnsupportedError(f"weights={weights!r} can't be had here: {reason}; leave it out")
    return BITS[weights]


def _load_rounded(name: str, bits: int, dtype: Any, *, sees: bool) -> Any:
    """The model with rounded weights, which computes in `dtype` between products."""
    model = load_whole(name, device="cpu", sees=sees).requires_grad_(False)
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError(
            f"weights='int{bits}' is for a model that is not quantised yet (got {name!r}); name "
            "its original weights, or load it as it is"
        )
    round_model(model, bits, dtype)
    return model


def load_whole(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    sees: bool = False,
) -> Any:
    """The model as transformers loads it, whole, with what reads images if it `sees`.

    Refuses files that lack weights, which transformers would make up. A device of ``"auto"`` is a
    GPU if there is one.
    """
    target, wanted = _device(device), _dtype(dtype)
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model, info = auto.from_pretrained(name, dtype=wanted, output_loading_info=True)
    check_complete(sorted(info["missing_keys"]))
    return model.to(target)


def _device(name: str | torch.device) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, dtype=torch.int8, device=name).device
        if device.type == "meta":
            raise NotImplementedError("it computes nothing")
        return device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        rule = "device must be one that torch can use here"
        raise ConfigError(f"{rule} (got {str(name)!r}: {one_line(error)})") from error


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    known = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if known == "auto" or (isinstance(known, torch.dtype) and known.is_floating_point):
        return known
    raise ConfigError(f"dtype must be one of torch's for floats, or 'auto' (got {dtype!r})")
