"""The demo's tables: how much sooner the text came, and where its tokens came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median

from rich import box
from rich.table import Table

from selfspec.cli.demo.timing import Run, Timed
from selfspec.cli.shared.live_text import OWN
from selfspec.cli.shared.paint import labels, style_of
from selfspec.stats import GenerationStats

_WIDE = 1.25  # Rounds that differ by more than this factor are reported as unsteady.


class Row:
    """A row of the tables: the runs over one snippet, or over several. Seconds go by round."""

    def __init__(self, name: str, timed: Sequence[Timed]) -> None:
        self.name = name
        first = [runs.drafted[0] for runs in timed]  # All rounds draft alike.
        self.stats = sum((run.stats for run in first), GenerationStats())
        self.origins = sum((run.count_origins() for run in first), Counter[str]())
        self.stock_seconds = _by_round([runs.stock for runs in timed])
        self.drafted_seconds = _by_round([runs.drafted for runs in timed])
        pairs = zip(self.stock_seconds, self.drafted_seconds, strict=True)
        self.speed_ups = [stock / drafted for stock, drafted in pairs]

    @property
    def spread(self) -> str:
        """The lowest and the highest speed-up; a dash where there was only one round."""
        ratios = self.speed_ups
        return f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "-"

    @property
    def is_unsteady(self) -> bool:
        """Do the rounds differ so much that their median says little?"""
        return max(self.speed_ups) > _WIDE * min(self.speed_ups)

    def share(self, origin: str) -> str:
        """How many of all tokens came from there."""
        return f"{self.origins[origin] / max(self.origins.total(), 1):.0%}"

    @property
    def per_step(self) -> str:
        """Tokens per step; a dash where the forward over the prompt wrote the whole text."""
        return f"{self.stats.tokens_per_step:.2f}" if self.stats.num_steps else "-"


Column = tuple[str, str, Callable[[Row], str]]  # title, style, cell

_TIMES: tuple[Column, ...] = (
    ("tokens", "", lambda row: str(row.origins.total())),
    ("per step", "", lambda row: row.per_step),
    ("stock", "", lambda row: f"{median(row.stock_seconds):.2f} s"),
    ("selfspec", "", lambda row: f"{median(row.drafted_seconds):.2f} s"),
    ("speed-up", "", lambda row: f"{median(row.speed_ups):.2f}x"),
    ("lowest to highest", "", lambda row: row.spread),
)


def summarise(names: Sequence[str], timed: Sequence[Timed]) -> list[Row]:
    """A row for each snippet, and at the end the one of all of them."""
    pairs = zip(names, timed, strict=True)
    return [*(Row(name, [runs]) for name, runs in pairs), Row("all", timed)]


def _by_round(runs: Sequence[Sequence[Run]]) -> list[float]:
    """The seconds of each round."""
    return [sum(run.seconds for run in in_round) for in_round in zip(*runs, strict=True)]


def times_table(rows: Sequence[Row]) -> Table:
    """Tokens per step, the median times, and the median speed-up with its spread."""
    return _table(rows, _TIMES)


def origins_table(rows: Sequence[Row], sources: Iterable[str]) -> Table:
    """The share of the tokens that each source drafted, and the model's own."""
    names = {**labels(sources), OWN: "model's own"}
    columns = [(label, style_of(o), partial(Row.share, origin=o)) for o, label in names.items()]
    return _table(rows, columns)


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    *snippets, total = rows
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_footer=True)
    table.add_column("snippet", total.name)
    for title, style, cell in columns:
        table.add_column(title, cell(total), style=style, justify="right")
    for row in snippets:
        table.add_row(row.name, *(cell(row) for _, _, cell in columns))
    return table
