"""A table: cells as text, ready for a terminal, for Markdown and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

NONE = "–"


class _NothingError(Exception):
    """A cell shows what there is nothing to say of."""


class _Cells(Formatter):
    """``!m`` turns bytes into MB, and ``:n`` shows three digits that count, or all in front."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            found = super().get_field(field_name, args, kwargs)
        except TypeError:  # Part of what is not there.
            raise _NothingError from None
        if found[0] is None:
            raise _NothingError
        return found

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value / 1e6 if conversion == "m" else super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "n":
            format_spec = f".{0 if value >= 100 else 1 if value >= 10 else 2}f"
        return format(value, format_spec)

    def cell(self, form: str, row: Mapping[str, Any]) -> str:
        """A dash if anything that it shows is None."""
        try:
            return self.vformat(form, (), row)
        except _NothingError:
            return NONE


class Table(NamedTuple):
    """A head, rows of cells, and a line below that says how to read them."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        columns: Mapping[str, str],
        rows: Iterable[Mapping[str, Any]],
        note: str = "",
    ) -> Table:
        """Of records: the format of a column, such as ``{seconds:.2f}``, names what it shows."""
        cells = [[_Cells().cell(form, row) for form in columns.values()] for row in rows]
        return cls(title, list(columns), cells, note)

    def telling(self) -> Table:
        """Without the columns that say nothing of any row."""
        kept = [n for n in range(len(self.head)) if any(row[n] != NONE for row in self.rows)]
        rows = [[row[n] for n in kept] for row in self.rows]
        return self._replace(head=[self.head[n] for n in kept], rows=rows)

    def markdown(self) -> str:
        """With the title as a heading."""
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        rows = ([cell.replace("|", "\\|") for cell in row] for row in (self.head, rule, *self.rows))
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([f"## {self.title}", "", *lines, *(["", self.note] if self.note else [])])
