"""A model's weights in 8 bits on disk: written once, in files that a streamed model reads.

They are in the user's cache folder, under a name that changes with the original files. A rounded
weight is a tensor of int8 and one of scales. All other weights are there too, as they are computed
with, so that the original files are not needed any more.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from selfspec.errors import WeightsError
from selfspec.machine.user_files import user_folder
from selfspec.weights.eight_bits import progress, users_in_eight_bits
from selfspec.weights.rounding import Numbers
from selfspec.weights.streamed.files import Shard, StoredTensor
from selfspec.weights.streamed.layer_weights import new_scratch, read_into

__all__ = ["is_rounded", "rounded_files", "stored_rounded"]

_VERSION = 1  # Another way of rounding needs another number.
_SCALE = ".scale"
_AT_ONCE = 1 << 28  # A file has about this many bytes, which are in memory while it is written.


def is_rounded(tensors: Sequence[StoredTensor]) -> bool:
    """Are these a weight in 8 bits and its scales?"""
    return len(tensors) == 2 and tensors[0].dtype is torch.int8


def stored_rounded(shards: Sequence[Shard]) -> dict[str, list[StoredTensor]]:
    """The tensors of each weight in files that were written here."""
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    return {
        name: [tensors[each] for each in (name, name + _SCALE) if each in tensors]
        for name in tensors
        if not name.endswith(_SCALE)
    }


def rounded_files(
    model: Any, stored: Mapping[str, Sequence[StoredTensor]], shards: Sequence[Shard]
) -> list[Path]:
    """The files with the rounded weights of a model, which has no values itself."""
    parent, rounded = user_folder(), {id(weight) for weight, _ in users_in_eight_bits(model)}
    names = {
        name
        for name, weight in model.named_parameters(remove_duplicate=False)
        if id(weight) in rounded and name in stored
    }
    if parent is None:
        raise WeightsError(
            "weights='int8' with max_memory needs a home folder, for files with rounded weights "
            "(there is none); set HOME, or leave weights out"
        )
    made_of = [_VERSION, str(model.dtype), sorted(names), [each.state for each in shards]]
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:32]
    folder = parent / "eight-bits" / key
    if not folder.is_dir():
        scratch = folder.with_name(f".{key}.{secrets.token_hex(4)}.tmp")
        scratch.mkdir(parents=True)
        try:
            _write(model, stored, names, scratch)
            with suppress(OSError):  # Another process may have been faster.
                os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return sorted(folder.glob("*.safetensors"))


def _write(
    model: Any,
    stored: Mapping[str, Sequence[StoredTensor]],
    names: Collection[str],
    folder: Path,
) -> None:
    weights = {name: each for name, each in model.state_dict().items() if name in stored}
    needed = sum(w.numel() * (1 if n in names else w.dtype.itemsize) for n, w in weights.items())
    if (free := shutil.disk_usage(folder).free) < 1.02 * needed:
        raise WeightsError(
            f"rounded weights need {needed / 1e9:.1f} GB on the disk of {folder.parent} (it has "
            f"{free / 1e9:.1f} GB left); make room, or point XDG_CACHE_HOME to another disk"
        )
    scratch, part, number = new_scratch(), dict[str, torch.Tensor](), 0
    with progress("Rounding weights, this once", weights.values()) as bar:
        for name, weight in weights.items():
            dtype = stored[name][0].dtype if name in names else weight.dtype
            full = torch.empty(weight.shape, dtype=dtype, device="cpu")
            read_into(full, stored[name], scratch)
            if name in names:
                full, part[name + _SCALE] = Numbers.of(full)
            part[name] = full
            if sum(each.nbytes for each in part.values()) >= _AT_ONCE:
                save_file(part, folder / f"{number:05}.safetensors")
                part, number = {}, number + 1
            bar.update(weight.numel())
    save_file(part, folder / f"{number:05}.safetensors")
