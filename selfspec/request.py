"""`Request`: one prompt as the engine is asked to decode it.

Whoever asks has made it of a `generate()` call, of which nothing below knows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from selfspec.draft.drafter import Drafter
from selfspec.draft.sources import Source
from selfspec.forward.prompt import PromptReader
from selfspec.row import Row, Streamer
from selfspec.stats import GenerationStats


class NewRow(Protocol):
    """Makes a row once its prompt was read; `prompt_ids` are without padding."""

    def __call__(self, *, prompt_ids: list[int], drafter: Drafter) -> Row: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A prompt of one or more rows, and what decides on their texts."""

    reader: PromptReader  # Reads the prompt, whole or in parts.
    new_rows: Sequence[NewRow]
    sources: Sequence[Sequence[Source]]  # What each row alone drafts from.
    encoder_texts: Sequence[Sequence[int]]  # What an encoder has read for each row, if any.
    streamer: Streamer | None  # Hears each token once all rows have it.
    max_new_columns: int  # How far after the prompt the last token may be, drafted or not.
    max_tree: int  # The most nodes of a row in one forward.
    fails_alone: bool  # Does an error of one row end this row, and no row of another request?
    stats: GenerationStats  # What is counted for it.
    scope: Hashable = None  # Which other prompts may go on after what it has read.
