"""What a paper reports, shown beside what was measured here and never mixed with it.

A file has one JSON object a line, each a table as its paper prints it: where it stands, on which
model and hardware it was measured, a head, and rows of cells. A copy lies with the report.
"""

from __future__ import annotations

from pathlib import Path

from eval.entries import Entry, read_entries
from eval.errors import EvalError
from eval.tables import Table
from selfspec.machine.user_files import replace_text

__all__ = ["REPORTED", "keep_tables", "kept_tables", "reported_tables"]

REPORTED = "reported.jsonl"
_FIELDS = ("source", "model", "hardware", "head", "rows")


def reported_tables(path: Path) -> list[Table]:
    """The tables of a file, one at least."""
    tables = [_table(entry) for entry in read_entries(path, _FIELDS)]
    if not tables:
        raise EvalError(f"{path} must have a table a line (got none); see eval/README.md")
    return tables


def keep_tables(path: Path, folder: Path) -> None:
    """Lays a copy of a file with a run, for its reports."""
    replace_text(folder / REPORTED, path.read_text(encoding="utf-8-sig"))


def kept_tables(folder: Path) -> list[Table]:
    """Those that lie with a run."""
    path = folder / REPORTED
    return reported_tables(path) if path.exists() else []


def _table(entry: Entry) -> Table:
    head = entry.texts("head")
    model, hardware = entry.text("model"), entry.text("hardware")
    return Table(
        f"As reported: {entry.text('source')}",
        head,
        entry.rows("rows", len(head)),
        f"Reported by its authors for {model} on {hardware}; nothing of it was measured here.",
    )
