"""How often each kind of evidence came true on real text: what a new calibration starts from.

Counted by `python -m eval.count_rates` on a chat model of 135 million parameters; the file beside
this module names nothing but kinds of evidence, hits and trials.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from selfspec.records import Evidence

__all__ = ["counted_rates"]

_FILE = Path(__file__).with_name("rates.json")


@cache
def counted_rates() -> Mapping[tuple[Evidence, ...], tuple[float, float]]:
    """Hits and trials, by the evidence of all sources that named a token."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return {
        tuple(Evidence(*part) for part in parts): (float(hits), float(trials))
        for parts, hits, trials in rows
    }
