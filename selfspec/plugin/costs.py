"""What a forward of this model costs here: measured on the very code that drafting runs.

A curve belongs to a model, its precision and attention, a device, a batch and a length of text,
within a factor of two. It is measured on first use and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from selfspec.cost import WIDTHS, CostBook, CostCurve
from selfspec.errors import UnsupportedError
from selfspec.plugin.abilities import probe
from selfspec.plugin.backends import TreeBackend
from selfspec.records import Queries

__all__ = ["Costs", "kept_curve", "profile"]

_Key = dict[str, str | int]
_MAX_SECONDS = 3.0  # of a call that finds no curve
_LEAST_CONTEXT = 512  # shorter texts are one bucket


class Costs:
    """The curves that one `SelfSpec` has come to know. Safe to use from several threads."""

    def __init__(self, book: CostBook | None = None) -> None:
        self._book = CostBook() if book is None else book
        self._curves: dict[tuple[Any, ...], tuple[_Key, CostCurve]] = {}
        self._lock = threading.Lock()

    def curve(self, model: Any, backend: TreeBackend, num_rows: int) -> CostCurve:
        """The curve for a batch at its present length; takes up to 3 seconds where it is new."""
        key = _key(model, num_rows, backend.kv.front)
        place = tuple(key.values())
        with self._lock:
            if place not in self._curves:
                curve = self._book.find(key) or _measured(backend, num_rows)
                self._curves[place] = key, curve
                self._book.keep(key, curve)
            return self._curves[place][1]

    def keep(self) -> None:
        """Writes down what real steps have taught about the curves."""
        with self._lock:
            known = list(self._curves.values())
        for key, curve in known:
            self._book.keep(key, curve)


def kept_curve(model: Any, *, num_columns: int, num_rows: int) -> CostCurve | None:
    """The curve that calls behind a text of that length go by; None where none is kept yet."""
    return CostBook().find(_key(model, num_rows, num_columns))


def profile(
    model: Any, *, num_columns: int, num_rows: int, max_seconds: float = 30.0
) -> tuple[_Key, CostCurve]:
    """Measures behind a text of `num_columns` tokens; returns what the curve depends on with it.

    Kept, so that the next call with a measured budget finds it. Refuses a model that can't verify
    a tree.
    """
    ability = probe(model)
    if ability.attention is None:
        raise UnsupportedError(f"a profile needs a model that can verify trees: {ability.reason}")
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.ones(num_rows, num_columns, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    positions = torch.full((num_rows, 1), num_columns, device=model.device)
    backend = TreeBackend(model, cache, ability.attention, positions, None, room=WIDTHS[-1])
    key, curve = _key(model, num_rows, num_columns), _measured(backend, num_rows, max_seconds)
    CostBook().keep(key, curve)
    return key, curve


def _measured(backend: TreeBackend, num_rows: int, max_seconds: float = _MAX_SECONDS) -> CostCurve:
    """Runs forwards behind the text and forgets them: the KV stays as it was."""

    def run(width: int) -> None:
        queries = Queries(list(range(width)), [-1] + [0] * (width - 1), [0] * width)
        logits = backend.forward(backend.lay_out([queries] * num_rows))
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)

    with torch.no_grad():
        return CostCurve.measure(run, max_seconds=max_seconds)


def _key(model: Any, num_rows: int, num_columns: int) -> _Key:
    """All that the cost depends on, by name."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    shape = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]
    return {
        "model": type(model).__name__,
        "config": shape,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype),
        "device": name,
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "rows": num_rows,
        "context": max(num_columns, _LEAST_CONTEXT).bit_length(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
