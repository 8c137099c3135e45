"""Checks the arrays of a cache folder: their shapes at once, and their values in full.

Every function raises `ValueError`, which says what must hold and what was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.errors import CacheFormatError
from selfspec.store.contents import Arrays

# The array of each LUT that holds the keys of its rows.
KEY_OF = {"lut": "tokens", "lut2": "pairs"}
_EVIDENCE = [str, int, int, int, int]
_RATES = [[list, hits, trials] for hits in (float, int) for trials in (float, int)]


def joined(tables: Mapping[str, Arrays]) -> dict[str, NDArray[Any]]:
    """The arrays of all LUTs in one dictionary: ``lut.ids``, ``lut2.pairs`` and so on."""
    try:
        for source, arrays in tables.items():
            _check_shapes(source, arrays)
    except ValueError as error:
        raise CacheFormatError(f"these tables can't be saved: {error}") from error
    return {f"{s}.{name}": array for s, arrays in tables.items() for name, array in arrays.items()}


def split(arrays: Arrays) -> dict[str, dict[str, NDArray[Any]]]:
    """Takes what `joined` returned apart again; costs the same for any size."""
    tables: dict[str, dict[str, NDArray[Any]]] = {}
    for name, array in arrays.items():
        source, _, rest = name.partition(".")
        tables.setdefault(source, {})[rest] = array
    for source, parts in tables.items():
        _check_shapes(source, parts)
    return tables


def _check_shapes(source: str, arrays: Arrays) -> None:
    if source not in KEY_OF:
        raise ValueError(f"a LUT must be one of {', '.join(KEY_OF)} (got {source!r})")
    key = KEY_OF[source]
    if set(arrays) != {key, "ids", "probabilities"}:
        raise ValueError(f"{source} must have {key}, ids, probabilities (got {sorted(arrays)})")
    keys, ids, probabilities = (arrays[name] for name in (key, "ids", "probabilities"))
    dtypes = [array.dtype.str for array in (keys, ids, probabilities)]
    if dtypes != ["<i4", "<i4", "<f2"]:
        raise ValueError(f"{source} must be int32, int32 and float16 (got {dtypes})")
    if ids.ndim != 2 or ids.shape != probabilities.shape:
        raise ValueError(f"{source} must have equal rows (got {ids.shape, probabilities.shape})")
    if keys.shape != ((len(ids), 2) if key == "pairs" else (len(ids),)):
        raise ValueError(f"{source} must have one key a row (got {keys.shape} for {len(ids)})")


def check_values(source: str, arrays: Arrays, num_ids: int) -> None:
    """Checks that keys are sorted and unique, and ids in the vocabulary; reads everything once."""
    _check_shapes(source, arrays)
    keys = arrays[KEY_OF[source]]
    _check_range(f"keys of {source}", keys, 0, num_ids)
    _check_range(f"ids of {source}", arrays["ids"], -1, num_ids)
    if (np.diff(flat_keys(keys)) <= 0).any():
        raise ValueError(f"keys of {source} must be sorted, none twice")


def flat_keys(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Tokens (N,) or pairs (N, 2) as one number each, in the same order."""
    wide = keys.astype(np.int64)
    return wide if wide.ndim == 1 else (wide[:, 0] << 32) + wide[:, 1]


def _check_range(name: str, ids: NDArray[Any], low: int, high: int) -> None:
    if ids.size and not (low <= ids.min() and ids.max() < high):
        raise ValueError(f"{name} must be in [{low}, {high}) (got {ids.min()} to {ids.max()})")


def check_rates(rows: object) -> list[list[Any]]:
    """Checks the rows of a calibration as they come from JSON: [[evidence, …], hits, trials].

    There may be thousands each time a folder is opened; a row takes 2 µs.
    """
    if not isinstance(rows, list) or not all(map(_is_rate, rows)):
        raise ValueError("calibration must be rows of evidence, hits and trials")
    return rows


def _is_rate(row: object) -> bool:
    if type(row) is not list or [type(part) for part in row] not in _RATES:
        return False
    kinds, hits, trials = row
    if not (0 <= hits <= trials < math.inf and trials > 0 and kinds):
        return False
    for part in kinds:
        if type(part) is not list or [type(value) for value in part] != _EVIDENCE:
            return False
    return True
