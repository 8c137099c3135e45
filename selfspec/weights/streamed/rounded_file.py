"""A model's rounded weights on disk: written once, into a file that a streamed model reads.

It is in the user's cache folder, under a name that changes with what rounding depends on. When it
is made anew, older files of the same weights go. A rounded weight is whole numbers and their
scales. All other weights are there too, as they are computed with, so that the original files are
not needed any more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec.errors import WeightsError, one_line
from selfspec.machine.user_files import remove_scratch, replacing, user_folder
from selfspec.weights.rounded import round_weight, stored_forms
from selfspec.weights.rounded_model import progress, weights_to_round
from selfspec.weights.streamed.files import Shard, StoredTensor
from selfspec.weights.streamed.layer_weights import ALIGNMENT, new_scratch, read_into

_log = logging.getLogger("selfspec")

_VERSION = 5  # Another way of rounding, or of writing, needs another number.

_BITS = {torch.int8: 8, torch.uint8: 4}
Stored = Mapping[str, Sequence[StoredTensor]]  # by the names of weights


def is_rounded(tensors: Sequence[StoredTensor]) -> bool:
    """Are these a rounded weight and its scales?"""
    return len(tensors) == 2 and tensors[0].dtype in _BITS


def plan_rounded(model: PreTrainedModel, stored: Stored, bits: int) -> Stored:
    """Where the file will have the weights. Until then, the tensors name another file."""
    rounded = dict(weights_to_round(model, bits))
    plan, end = dict[str, list[StoredTensor]](), 0
    for name, weight in model.state_dict(keep_vars=True).items():
        forms = [(weight.dtype, tuple(weight.shape))]
        if weight in rounded:
            forms = stored_forms(tuple(weight.shape), rounded[weight])
        for dtype, shape in forms if name in stored else ():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            tensor = StoredTensor(next(iter(stored.values()))[0].shard, start, dtype, shape)
            plan.setdefault(name, []).append(tensor)
            end = start + tensor.num_bytes
    return plan


def rounded_file(plan: Stored, stored: Stored, shards: Sequence[Shard]) -> Path:
    """The file of a plan, which is written if it is not there or was cut off."""
    from filelock import FileLock, Timeout

    parent = user_folder()
    if parent is None:
        raise WeightsError(
            "weights= with max_memory needs a home folder, for a file with rounded weights (there "
            "is none); set HOME, or leave weights out"
        )
    path = parent / "rounded" / _name(plan, stored, shards)
    if _is_whole(path, plan):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / ".lock")
        try:
            locked = lock.acquire(timeout=0)
        except Timeout:
            _log.warning("another process writes rounded weights; waiting for it")
            locked = lock.acquire()
        with locked:
            if not _is_whole(path, plan):
                remove_scratch(path.parent)
                _write(path, plan, stored)
                _remove_older(path)
    except OSError as error:
        raise WeightsError(
            f"rounded weights must be written to {path} (got {one_line(error)}); make room there, "
            "or point XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return path


def _name(plan: Stored, stored: Stored, shards: Sequence[Shard]) -> str:
    """The name of a file: which weights it has, then what is read for them, by which version."""
    layout = [[name, *(tuple(map(str, part[1:])) for part in plan[name])] for name in plan]
    paths = [shard.state[0] for shard in shards]
    parts = [
        [name, *((part.shard.state[0], *map(str, part[1:])) for part in stored[name])]
        for name in plan
    ]
    # In 4 bits, numbers are in the order that this processor reads.
    made_by = _VERSION, torch.backends.cpu.get_cpu_capability()
    made_of = parts, [shard.state for shard in shards]
    return f"{_digest(layout, paths)}-{_digest(*made_by, *made_of)}.weights"


def _digest(*made_of: Any) -> str:
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]


def _remove_older(path: Path) -> None:
    """Removes files of the same weights from before, which no load wants any more."""
    for older in path.parent.glob(f"{path.name.partition('-')[0]}-*.weights"):
        if older != path:
            with suppress(OSError):  # On Windows, while another process reads it.
                older.unlink()


def _num_bytes(plan: Stored) -> int:
    last = list(plan.values())[-1][-1]
    return last.offset + last.num_bytes


def _is_whole(path: Path, plan: Stored) -> bool:
    return path.exists() and path.stat().st_size == _num_bytes(plan)


def _write(path: Path, plan: Stored, stored: Stored) -> None:
    needed, free = _num_bytes(plan), shutil.disk_usage(path.parent).free
    if free < 1.02 * needed:
        raise OSError(f"{needed / 1e9:.1f} GB are needed, and {free / 1e9:.1f} GB are left")
    scratch, total = new_scratch(), sum(tensors[0].numel for tensors in plan.values())
    with replacing(path) as file, progress("Rounding weights, this once", total) as bar:
        for name, tensors in plan.items():
            like, bits = tensors[0], _BITS[tensors[0].dtype] if is_rounded(tensors) else None
            dtype, shape = like.dtype, like.shape
            if bits is not None:
                dtype, shape = stored[name][0].dtype, (shape[0], shape[1] * 8 // bits)
            full = torch.empty(shape, dtype=dtype, device="cpu")
            read_into(full, stored[name], scratch)
            rounded = None if bits is None else round_weight(full, bits)
            parts = [full] if rounded is None else [rounded.numbers, rounded.scales]
            for tensor, part in zip(tensors, parts, strict=True):
                file.write(bytes(tensor.offset - file.tell()))
                values: Any = part.view(-1).view(torch.uint8).numpy()
                file.write(values)
            bar.update(like.numel)
