"""`Request`: one prompt as the engine is asked to decode it.

Whoever asks has made it of a `generate()` call, of which nothing below knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from selfspec.draft.drafter import Drafter
from selfspec.draft.sources import Source
from selfspec.forward.prompt import PromptReader
from selfspec.row import Row, Streamer
from selfspec.stats import GenerationStats


class NewRow(Protocol):
    """Makes a row once its prompt was read, with what else decides on its tokens."""

    def __call__(self, *, prompt_ids: list[int], drafter: Drafter) -> Row:
        """`prompt_ids` are the prompt without padding."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt of one or more rows, and what decides on their texts.

    Attributes:
        reader: Reads the prompt, whole or in parts.
        new_rows: For each row, makes it of its `prompt_ids` and its `drafter`.
        sources: For each row, what it alone drafts from.
        encoder_texts: For each row, the text that an encoder has read, if any.
        streamer: Hears each token once all rows have it.
        max_new_columns: How far after the prompt the last token may be, drafted or not.
        max_tree: The most nodes of a row in one forward.
        fails_alone: Whether an error of one row ends this row, and no row of another request.
        stats: What is counted for it.
    """

    reader: PromptReader
    new_rows: Sequence[NewRow]
    sources: Sequence[Sequence[Source]]
    encoder_texts: Sequence[Sequence[int]]
    streamer: Streamer | None
    max_new_columns: int
    max_tree: int
    fails_alone: bool
    stats: GenerationStats
