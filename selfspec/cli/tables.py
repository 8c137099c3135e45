"""The demo's figures: how much sooner the text came, and where its tokens came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from selfspec.cli.live import OWN
from selfspec.cli.paint import labels, style_of
from selfspec.cli.timing import Timed
from selfspec.stats import GenerationStats

__all__ = ["Summary", "origins_table", "summarise", "times_table"]


@dataclass
class Summary:
    """A row of the tables; `+` makes the one over all."""

    stats: GenerationStats = field(default_factory=GenerationStats)
    stock_seconds: float = 0.0
    drafted_seconds: float = 0.0
    origins: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, runs: Timed) -> Summary:
        """Times are medians of the rounds; what was drafted is the first round's."""
        run = runs.drafted[0]
        return cls(run.stats, runs.stock_seconds, runs.drafted_seconds, run.count_origins())

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.stats + other.stats,
            self.stock_seconds + other.stock_seconds,
            self.drafted_seconds + other.drafted_seconds,
            self.origins + other.origins,
        )

    def share(self, origin: str) -> str:
        """How many of all tokens came from there."""
        return f"{self.origins[origin] / max(self.origins.total(), 1):.0%}"


Column = tuple[str, str, Callable[[Summary], str]]  # title, style, cell
Rows = Sequence[tuple[str, Summary]]

_TIMES: tuple[Column, ...] = (
    ("tokens", "", lambda row: str(row.origins.total())),
    ("tokens per step", "", lambda row: _per_step(row.stats)),
    ("stock", "", lambda row: f"{row.stock_seconds:.2f} s"),
    ("selfspec", "", lambda row: f"{row.drafted_seconds:.2f} s"),
    ("speed-up", "", lambda row: f"{row.stock_seconds / row.drafted_seconds:.2f}x"),
)


def summarise(names: Sequence[str], timed: Sequence[Timed]) -> Rows:
    """A summary for each snippet, and behind them the one over all."""
    rows = [Summary.of(runs) for runs in timed]
    return [*zip(names, rows, strict=True), ("all", sum(rows, Summary()))]


def _per_step(stats: GenerationStats) -> str:
    """A dash where the prompt's forward alone wrote the whole text."""
    return f"{stats.tokens_per_step:.2f}" if stats.num_steps else "-"


def times_table(rows: Rows) -> Table:
    """Tokens per step, both times and the speed-up."""
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
