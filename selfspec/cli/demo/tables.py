"""The demo's tables: how much sooner the text came, and where its tokens came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich import box
from rich.table import Table

from selfspec.cli.demo.timing import Timed
from selfspec.cli.shared.live_text import OWN
from selfspec.cli.shared.paint import labels, style_of
from selfspec.stats import GenerationStats

_WIDE = 1.25  # Rounds that differ by more than this factor are reported as unsteady.


@dataclass
class Summary:
    """A row of the tables: one snippet, or with `+` several. Seconds are listed by round."""

    stats: GenerationStats = field(default_factory=GenerationStats)
    stock_seconds: Sequence[float] = ()
    drafted_seconds: Sequence[float] = ()
    origins: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, runs: Timed) -> Summary:
        """Statistics and origins are those of the first round; all rounds draft alike."""
        run = runs.drafted[0]
        stock, drafted = ([each.seconds for each in way] for way in (runs.stock, runs.drafted))
        return cls(run.stats, stock, drafted, run.count_origins())

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.stats + other.stats,
            _added(self.stock_seconds, other.stock_seconds),
            _added(self.drafted_seconds, other.drafted_seconds),
            self.origins + other.origins,
        )

    @property
    def speed_ups(self) -> list[float]:
        """How many times sooner the text came, in each round."""
        pairs = zip(self.stock_seconds, self.drafted_seconds, strict=True)
        return [stock / drafted for stock, drafted in pairs]

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


Column = tuple[str, str, Callable[[Summary], str]]  # title, style, cell
Rows = Sequence[tuple[str, Summary]]

_TIMES: tuple[Column, ...] = (
    ("tokens", "", lambda row: str(row.origins.total())),
    ("per step", "", lambda row: _per_step(row.stats)),
    ("stock", "", lambda row: f"{median(row.stock_seconds):.2f} s"),
    ("selfspec", "", lambda row: f"{median(row.drafted_seconds):.2f} s"),
    ("speed-up", "", lambda row: f"{median(row.speed_ups):.2f}x"),
    ("lowest to highest", "", lambda row: row.spread),
)


def summarise(names: Sequence[str], timed: Sequence[Timed]) -> Rows:
    """A summary of each snippet, and at the end the one of all of them."""
    rows = [Summary.of(runs) for runs in timed]
    return [*zip(names, rows, strict=True), ("all", sum(rows, Summary()))]


def _added(one: Sequence[float], other: Sequence[float]) -> Sequence[float]:
    """Seconds summed round by round; the empty summary that a sum starts from adds nothing."""
    return [left + right for left, right in zip(one, other, strict=True)] if one else other


def _per_step(stats: GenerationStats) -> str:
    """Tokens per step; a dash where the forward over the prompt wrote the whole text."""
    return f"{stats.tokens_per_step:.2f}" if stats.num_steps else "-"


def times_table(rows: Rows) -> Table:
    """Tokens per step, the median times, and the median speed-up with its spread."""
    return _table(rows, _TIMES)


def origins_table(rows: Rows, sources: Iterable[str]) -> Table:
    """The share of the tokens that each source drafted, and the model's own."""
    names = {**labels(sources), OWN: "model's own"}
    return _table(rows, [_origin_column(*item) for item in names.items()])


def _origin_column(origin: str, label: str) -> Column:
    return label, style_of(origin), lambda row: row.share(origin)


def _table(rows: Rows, columns: Sequence[Column]) -> Table:
    *snippets, (total_name, total) = rows
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_footer=True)
    table.add_column("snippet", total_name)
    for title, style, cell in columns:
        table.add_column(title, cell(total), style=style, justify="right")
    for name, row in snippets:
        table.add_row(name, *(cell(row) for _, _, cell in columns))
    return table
