"""Where candidates come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from selfspec.draft.sources.common import CommonSource
from selfspec.draft.sources.context import ContextSource
from selfspec.draft.sources.lut import LutSource
from selfspec.draft.sources.runners import RunnersSource
from selfspec.draft.sources.source import Cursor, RowStart, Source
from selfspec.draft.sources.texts import TextsSource

__all__ = [
    "REGISTRY",
    "CommonSource",
    "ContextSource",
    "Cursor",
    "LutSource",
    "RowStart",
    "RunnersSource",
    "Source",
    "TextsSource",
]

# By the size of the vocabulary and how many tokens are named for a node.
REGISTRY: dict[str, Callable[[int, int], Source]] = {
    "lut": LutSource,
    "lut2": partial(LutSource, order=2),
    "context": lambda _vocab_size, top_k: ContextSource(top_k),
    "texts": lambda _vocab_size, _top_k: TextsSource(),
    "common": lambda vocab_size, _top_k: CommonSource(vocab_size),
    "runners": lambda _vocab_size, _top_k: RunnersSource(),
}
