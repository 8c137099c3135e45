"""Where candidates come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from selfspec.draft.sources.answers import AnswersSource
from selfspec.draft.sources.common import CommonSource
from selfspec.draft.sources.context import ContextSource
from selfspec.draft.sources.lut import LutSource
from selfspec.draft.sources.near_misses import NearMissesSource
from selfspec.draft.sources.source import Cursor, RowStart, Source

__all__ = [
    "REGISTRY",
    "AnswersSource",
    "CommonSource",
    "ContextSource",
    "Cursor",
    "LutSource",
    "NearMissesSource",
    "RowStart",
    "Source",
]

# By the size of the vocabulary and how many tokens are named for a node.
REGISTRY: dict[str, Callable[[int, int], Source]] = {
    "lut": LutSource,
    "lut2": partial(LutSource, order=2),
    "context": lambda _vocab_size, top_k: ContextSource(top_k),
    "answers": lambda _vocab_size, _top_k: AnswersSource(),
    "common": lambda vocab_size, _top_k: CommonSource(vocab_size),
    "near_misses": lambda _vocab_size, _top_k: NearMissesSource(),
}
