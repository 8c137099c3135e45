"""`load`: a model that only generates, held in as little memory as that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from selfspec.errors import ConfigError
from selfspec.plugin.attach import attach
from selfspec.run.packed import InPlace, own_memory, pack_loaded
from selfspec.run.streamed import check_complete, is_streamed, load_within

__all__ = ["load"]


def load(
    name: str | Path,
    max_memory: int | str | None = None,
    *,
    max_length: int = 2048,
    max_texts: int = 1,
    draft_model: Any = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
) -> Any:
    """Loads a causal language model for generating, attached.

    It is the model that `AutoModelForCausalLM.from_pretrained()` loads, without gradients. On a CPU
    its linear layers are packed in place, if timing a few of them shows that this makes them
    faster. So the model takes as much memory as its weights. Code that reads packed weights gets
    them back, and from then on the model is packed no more.

    With `max_memory`, embeddings, norms, the output head and as many decoder layers as the budget
    allows are resident. The other layers are *streamed*: read from the model's safetensors files
    ahead of the forward, by a thread, round and round. A streamed model can't be moved, cast,
    saved, copied or trained, and its weights can't be written.

    Args:
        name: A folder, or the id of a model on the Hub.
        max_memory: What weights, buffers, KV and forwards may take together: bytes, or text such
            as ``"2GB"``, ``"500MiB"`` or ``"25%"``, a share of what the whole model takes.
            If all fits, nothing is streamed.
        max_length: Of `max_memory`, room for a prompt and answer of this many tokens is set aside:
            for its KV, and for a forward that reads it at once. Longer texts work too, and take
            more memory.
        max_texts: The KV of this many such texts is set aside, which are decoded at the same time.
        draft_model: The small model that will draft for this one. What it takes is a part of
            `max_memory`, so that fewer layers of this model are resident.
        dtype: ``"auto"`` is the checkpoint's own.
        device: Where the model computes. On a CUDA device, streamed layers come from pinned
            memory if that holds them.

    Raises:
        ConfigError: An option has a wrong value, or `max_memory` is too small; the message names
            the least that would do.
        WeightsError: A file is missing or damaged, or, with `max_memory`, not of safetensors.
        UnsupportedError: Models of this kind can't be streamed.
    """
    source, device, dtype = str(name), _device(device), _dtype(dtype)
    for what, number in {"max_length": max_length, "max_texts": max_texts}.items():
        if number < 1:
            raise ConfigError(f"{what} must be >= 1 (got {number})")
    if max_memory is None:
        model = _whole(source, dtype, device)
    else:
        room = {"max_length": max_length, "max_texts": max_texts, "draft_model": draft_model}
        model = load_within(source, max_memory, dtype=dtype, device=device, **room)
    pack_loaded(model, InPlace(kept=is_streamed(model), copies=max_memory is None))
    return attach(model)


def _whole(name: str, dtype: str | torch.dtype, device: torch.device) -> Any:
    """The whole model; transformers would make up weights that the files lack."""
    model, info = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    check_complete(sorted(info["missing_keys"]))
    model = model.to(device).requires_grad_(False)
    own_memory(model)
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


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype for floats, or ``"auto"``."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if found == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise ConfigError(f"dtype must be one of torch's for floats, or 'auto' (got {dtype!r})")
