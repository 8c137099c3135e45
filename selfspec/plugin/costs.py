"""What a forward of this model costs here: measured on the very code that drafting runs.

A curve belongs to a model, its precision and attention, a device, a batch and a length of text,
within a factor of two. It is measured on first use and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from selfspec.cost import STEPS, WIDTHS, CostBook, CostCurve, SteppedCurve, stepped
from selfspec.errors import UnsupportedError
from selfspec.hardware import device_name
from selfspec.plugin.abilities import probe
from selfspec.plugin.backends import AttentionTypes, ChainBackend, TreeBackend
from selfspec.plugin.forwards import Forwards, Lent
from selfspec.plugin.graphs import GraphBackend
from selfspec.records import Queries

__all__ = ["Costs", "kept_curve", "profile"]

_Key = dict[str, str | int]
_Backend = TreeBackend | GraphBackend | ChainBackend
_MAX_SECONDS = 3.0  # of a call that finds no curve
_LEAST_CONTEXT = 128  # shorter texts, up to twice that, are one bucket


class Costs:
    """The curves that one `SelfSpec` has come to know. Safe to use from several threads."""

    def __init__(self, book: CostBook | None = None) -> None:
        self._book = CostBook() if book is None else book
        self._curves: dict[tuple[Any, ...], tuple[_Key, CostCurve]] = {}
        self._lock = threading.Lock()

    def curve(self, model: Any, backend: _Backend, num_rows: int, widest: int) -> CostCurve:
        """The curve for a batch at its present length; takes up to 3 seconds where it is new.

        New is one, too, that was measured for narrower forwards than `widest`. Graphs that are
        not there yet are captured first, which takes what it takes.
        """
        key = _key(model, num_rows, backend.front, _forward_of(backend), backend.rounding)
        widths = _widths(backend, widest)
        place = tuple(key.values())
        with self._lock:
            _, known = self._curves.get(place, (key, None))
            curve = known or self._found(key, backend)
            if curve is None or curve.widths[-1] < widths[-1]:
                curve = _measured(backend, num_rows, widths).reaching(widths[-1])
            if curve is not known:
                self._curves[place] = key, curve
                self._book.keep(key, curve)
            return curve

    def _found(self, key: _Key, backend: _Backend) -> CostCurve | None:
        curve = self._book.find(key)
        if curve is None or not isinstance(backend, GraphBackend):
            return curve
        return SteppedCurve.from_dict(curve.as_dict())

    def keep(self) -> None:
        """Writes down what real steps have taught about the curves."""
        with self._lock:
            known = list(self._curves.values())
        for key, curve in known:
            self._book.keep(key, curve)


def kept_curve(
    model: Any, *, num_columns: int, num_rows: int, forward: str = "eager", rounding: str = "free"
) -> CostCurve | None:
    """The curve that calls behind a text of that length go by; None where none is kept yet.

    `forward` and `rounding` are how they are run, as `GenerationStats` names it.
    """
    return CostBook().find(_key(model, num_rows, num_columns, forward, rounding))


def profile(
    model: Any,
    *,
    num_columns: int,
    num_rows: int,
    max_seconds: float = 30.0,
    forward: str = "auto",
    rounding: str = "stock",
) -> tuple[_Key, CostCurve]:
    """Measures behind a text of `num_columns` tokens; returns what the curve depends on with it.

    Kept, so that the next call with a measured budget finds it. Refuses a model that can't verify
    a tree, or can't be run as asked.
    """
    ability = probe(model)
    if ability.attention is None:
        raise UnsupportedError(f"a profile needs a model that can verify trees: {ability.reason}")
    with (
        torch.no_grad(),
        Forwards().lend(model, ability.attention, forward, rounding=rounding) as lent,
        lent.decoding(model),
    ):
        if lent.reason is not None and forward != "auto":
            raise UnsupportedError(f"forward={forward!r} can't be had: {lent.reason}")
        backend = _behind_a_text(model, ability.attention, num_rows, num_columns, lent)
        key = _key(model, num_rows, num_columns, _forward_of(backend), backend.rounding)
        widths = _widths(backend, WIDTHS[-1])
        curve = _measured(backend, num_rows, widths, max_seconds)
    CostBook().keep(key, curve)
    return key, curve


def _behind_a_text(
    model: Any,
    attention: AttentionTypes,
    num_rows: int,
    num_columns: int,
    lent: Lent,
) -> _Backend:
    """The backend that a call would have, the text read."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.ones(num_rows, num_columns, dtype=torch.long, device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    positions = torch.full((num_rows, 1), num_columns, device=model.device)
    arguments = (cache, attention, positions, None)
    if lent.runner is not None:
        widest = STEPS[-1]
        return GraphBackend(model, lent.runner, *arguments, room=widest, widest=widest)
    return TreeBackend(model, *arguments, room=WIDTHS[-1], kind=lent.kind, rounding=lent.rounding)


def _widths(backend: _Backend, widest: int) -> tuple[int, ...]:
    """Those to measure, so that a forward of `widest` queries has a price; one at least."""
    if isinstance(backend, GraphBackend):
        return tuple(width for width in STEPS if width <= stepped(widest))
    return tuple(width for width in WIDTHS if width <= widest)


def _measured(
    backend: _Backend,
    num_rows: int,
    widths: Sequence[int],
    max_seconds: float = _MAX_SECONDS,
) -> CostCurve:
    """Runs forwards behind the text and forgets them: the KV stays as it was."""

    def run(width: int) -> None:
        queries = Queries(list(range(width)), [-1] + [0] * (width - 1), [0] * width)
        layout: Any = backend.lay_out([queries] * num_rows)
        logits = backend.forward(layout)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        if isinstance(backend, ChainBackend):
            backend.forget()

    with torch.no_grad():
        if not isinstance(backend, GraphBackend):
            return CostCurve.measure(run, widths, max_seconds=max_seconds)
        for width in widths:
            run(width)
        return SteppedCurve.measure(run, widths, max_seconds=max_seconds)


def _forward_of(backend: _Backend) -> str:
    if not isinstance(backend, ChainBackend):
        return backend.kind
    return "chain" if backend.kind == "eager" else f"{backend.kind} chain"


def _key(model: Any, num_rows: int, num_columns: int, forward: str, rounding: str) -> _Key:
    """All that the cost depends on, by name."""
    shape = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]
    return {
        "model": type(model).__name__,
        "config": shape,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype),
        "device": device_name(model.device),
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "rows": num_rows,
        "context": max(num_columns, _LEAST_CONTEXT).bit_length(),
        "forward": forward,
        "rounding": rounding,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
