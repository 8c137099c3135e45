"""What was learned since the last save, and how it goes on top of what a folder keeps.

Of a LUT row the newer one counts, of hits and trials all. Tables stay as large as they are in
memory: what is put together goes through the sources, whose room is limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from selfspec.draft.calibration import Calibration
from selfspec.draft.sources import REGISTRY, LastingSource
from selfspec.store.contents import Arrays, CacheContents
from selfspec.store.tables import KEY_OF, flat_keys

Rates = list[list[Any]]


def news(now: CacheContents, before: CacheContents) -> CacheContents | None:
    """The rows and rates of `now` that are not those of `before`; None if there are none."""
    tables = {
        source: rows
        for source, arrays in now.tables.items()
        if len((rows := _changed_rows(source, arrays, before.tables.get(source)))["ids"])
    }
    known = _by_kinds(before.calibration)
    rates = [row for row in now.calibration or [] if known.get(_kinds(row)) != row]
    if not tables and not rates:
        return None
    return CacheContents(tokenizer=now.tokenizer, tables=tables, calibration=rates, about=now.about)


def on_top(
    learned: CacheContents, before: CacheContents, kept: CacheContents | None, vocab_size: int
) -> tuple[dict[str, Arrays], Rates]:
    """The tables and rates of `kept` with the news `learned` since `before` on top."""
    held = kept or CacheContents(tokenizer=learned.tokenizer)
    tables = {
        source: _put_together(source, parts, vocab_size)
        for source in KEY_OF
        if (parts := [each.tables[source] for each in (held, learned) if source in each.tables])
    }
    calibration = Calibration()
    calibration.restore(held.calibration or [])
    calibration.restore(_added_up(learned, before, held))
    return tables, calibration.rows()


def _changed_rows(source: str, now: Arrays, before: Arrays | None) -> Arrays:
    if before is None or not len(before["ids"]):
        return now
    keys, old_keys = (flat_keys(arrays[KEY_OF[source]]) for arrays in (now, before))
    found = np.searchsorted(old_keys, keys).clip(max=len(old_keys) - 1)
    same = old_keys[found] == keys
    for name in ("ids", "probabilities"):
        same &= (before[name][found] == now[name]).all(axis=1)
    return {name: array[~same] for name, array in now.items()}


def _put_together(source: str, parts: list[Arrays], vocab_size: int) -> Arrays:
    """All rows, of a key that several parts have the last part's, in a table of a fixed size."""
    table = REGISTRY[source](vocab_size, max(part["ids"].shape[1] for part in parts))
    assert isinstance(table, LastingSource)
    for part in parts:
        table.restore(part)
    return table.arrays()


def _added_up(learned: CacheContents, before: CacheContents, kept: CacheContents) -> Iterator[Any]:
    """The new rates. Those that another process has changed meanwhile are a mean of both.

    The mean is weighed by trials, which add up but for those that both started from. Differences
    of hits can't be added up, since older ones have faded.
    """
    old, theirs = _by_kinds(before.calibration), _by_kinds(kept.calibration)
    for row in learned.calibration or []:
        kinds = _kinds(row)
        other, start = theirs.get(kinds), old.get(kinds)
        if other is None or other == start:
            yield row
            continue
        trials = other[2] + max(row[2] - (start[2] if start else 0.0), 0.0)
        rate = min((row[1] + other[1]) / (row[2] + other[2]), 1.0)
        yield [row[0], rate * trials, trials]


def _by_kinds(rates: Rates | None) -> dict[Any, list[Any]]:
    return {_kinds(row): row for row in rates or []}


def _kinds(row: list[Any]) -> tuple[Any, ...]:
    return tuple(map(tuple, row[0]))
