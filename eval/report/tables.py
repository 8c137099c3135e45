"""The tables of a report, from a summary: cells as text, ready for Markdown and for HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Formatter
from typing import Any, NamedTuple

from eval.methods.names import OURS, STOCK
from eval.methods.reported import REPORTED
from eval.report.statistics import OVERALL

_NONE = "–"
_EVEN = 0.01  # differences of 1 % are none

Summary = Mapping[str, Any]


class _Cells(Formatter):
    """What there is nothing to say of is a dash, and ``!m`` turns bytes into MB."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return _NONE if value is None else format(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value / 1e6 if conversion == "m" else super().convert_field(value, conversion)


_CELLS = _Cells()


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
        cells = [[_CELLS.vformat(form, (), row) for form in columns.values()] for row in rows]
        return cls(title, list(columns), cells, note)

    def markdown(self) -> str:
        """With the title as a heading."""
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        rows = [self.head, rule, *self.rows]
        lines = [f"| {' | '.join(_piped(cell) for cell in row)} |" for row in rows]
        return "\n".join([f"## {self.title}", "", *lines, *(["", self.note] if self.note else [])])

    def html(self) -> str:
        """The same."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{_cells(row)}</tr>" for row in self.rows)
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return (
            f"<h2>{escape(self.title)}</h2><div class='wide'><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>{note}"
        )


def methods_table(summary: Summary) -> Table:
    """A row for each method, over all questions: what most readers look for."""
    head = ["method", "speed-up", "95 %", "tokens/s", "tokens per step", "same text", "failed"]
    rows = [_method_row(name, parts[OVERALL]) for name, parts in _taking_part(summary).items()]
    note = (
        "Speed-up: stock's seconds over the method's, prompts and all, of all questions together, "
        "with the interval in which 95 % of resamplings put it. Tokens per step: in brackets the "
        "queries of a step, nodes and branches. Same text: answers equal to stock's, near-ties and "
        "different ones behind them."
    )
    if (reported := REPORTED.get(summary["settings"].get("study"))) is not None:
        head.append(reported.head)
        rows = [[*row, reported.figures.get(row[0], _NONE)] for row in rows]
        note = f"{note} {reported.note}"
    return Table("All questions", *_told(head, rows), note)


def details_table(summary: Summary) -> Table:
    """The other figures of the same rows."""
    head = ["method", "mean", "median", "quartiles", "worst", "rounds", "tokens a query"]
    head += ["ms a token", "LUTs, MB"]
    rows = [_detail_row(name, parts[OVERALL]) for name, parts in _taking_part(summary).items()]
    note = (
        "Mean, median, quartiles and worst: the speed-ups of single questions. Rounds: the totals "
        "of single rounds, from the least to the most. Tokens a query: 1 for plain decoding."
    )
    return Table("All questions, in detail", *_told(head, rows), note)


def verdict(summary: Summary) -> str:
    """What came of the run, in a sentence or two that come before any table."""
    overall = {name: parts[OVERALL] for name, parts in _taking_part(summary).items()}
    speed_ups = {name: each["speed_up"] for name, each in overall.items() if each["speed_up"]}
    speed_ups.pop(STOCK, None)
    parts = [_stopped(summary)]
    if speed_ups:
        named = OURS if OURS in speed_ups else max(speed_ups, key=lambda n: speed_ups[n]["total"])
        parts.append(_sentence(named, speed_ups.pop(named), overall[named]))
    if speed_ups:
        best = max(speed_ups, key=lambda name: speed_ups[name]["total"])
        parts.append(f"The best of the others, {best}: {_times(speed_ups[best], 'total')}.")
    return " ".join(filter(None, parts)) or "No method was compared with stock."


def _stopped(summary: Summary) -> str:
    done, asked = summary["num_done"], summary["num_asked"]
    if asked is None or done >= asked:
        return ""
    return f"The run was stopped when {done} of {asked} questions were answered."


def _sentence(name: str, speed_up: Mapping[str, float], figures: Mapping[str, Any]) -> str:
    low, high = speed_up["low"], speed_up["high"]
    sure = "" if low > 1 or high < 1 else ", so the difference may be chance"
    same = _verdicts(name, figures)
    texts = f"; the text was stock's in {same}" if same != _NONE else ""
    told = f"{name} ran at {_times(speed_up, 'total')} the speed of stock generate()"
    return f"{told} ({low:.2f}x to {high:.2f}x in 95 % of resamplings{sure}){texts}."


def tasks_table(summary: Summary, title: str, figure: str) -> Table:
    """A row for each method and a column for each task, of `speed_up` or another figure."""
    methods = _taking_part(summary)
    tasks = list(next(iter(methods.values())))
    rows = [
        [name, *(_cell(parts[task], figure) for task in tasks)]
        for name, parts in methods.items()
        if not (figure == "speed_up" and name == STOCK)
    ]
    return Table(title, ["method", *tasks], rows)


def steps_table(summary: Summary) -> Table:
    """A row for each task and method: what was gained, in all and from decoding alone."""
    head = ["task", "method", "answers", "tokens", "ms a token", "speed-up", "median", "quartiles"]
    head += ["rounds", "min", "max", "prompt", "answer", "by drafts", "answer, ms a token"]
    head += ["tokens per step", "forwards", "copies, MB", "same text"]
    methods = _taking_part(summary)
    rows = [
        [task, name, *_step_cells(name, parts[task])]
        for task in next(iter(methods.values()))
        for name, parts in methods.items()
    ]
    absent = (f"{name} is left out: {why}." for name, why in summary["left_out"].items())
    note = (
        "Speed-up: stock's seconds over the method's, prompts and all; median, quartiles, min and "
        "max of single questions. Prompt and answer: the same of the time up to the end of the "
        "prompt's forward, and of all behind it. By drafts: over forward-only's seconds in place "
        "of stock's, so no faster forward is in it. Forwards: how they were run when an answer "
        "ended, by answers."
    )
    return Table("By task", head, rows, " ".join([note, *absent]))


def _taking_part(summary: Summary) -> dict[str, Any]:
    """The methods but for those that were left out."""
    methods, left_out = summary["methods"], summary["left_out"]
    return {name: parts for name, parts in methods.items() if name not in left_out}


def _step_cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    failed = figures["num_failed"]
    speed_up = figures["speed_up"]
    return [
        str(figures["num_answers"]) + f" ({failed} failed)" * bool(failed),
        str(figures["num_new_tokens"]),
        _number(figures["ms_per_token"]),
        *(_times(speed_up, key) for key in ("total", "median")),
        _quartiles(speed_up),
        _rounds(figures),
        *(_times(speed_up, key) for key in ("min", "max")),
        *(
            _times(figures[f"{part}_speed_up"], "total")
            for part in ("prefill", "decode", "drafting")
        ),
        _number(figures["decode_ms_per_token"]),
        _cell(figures, "tokens_per_step"),
        ", ".join(f"{count} {name}" for name, count in figures["forwards"].items()) or _NONE,
        _megabytes(figures["packed_bytes"]),
        _verdicts(name, figures),
    ]


def winners(summary: Summary) -> list[str]:
    """Where another method beats selfspec, by more than 1 %: a line for each task and figure."""
    methods = summary["methods"]
    if OURS not in methods:
        return []
    names = {"speed_up": "speed-up", "tokens_per_step": "tokens per step"}
    lines = []
    for figure, called in names.items():
        for task, own in methods[OURS].items():
            value = _value(own, figure)
            for name, parts in methods.items():
                other = _value(parts[task], figure)
                if name != OURS and value and other and other > value * (1 + _EVEN):
                    cells = f"{name} {_cell(parts[task], figure)}, {OURS} {_cell(own, figure)}"
                    lines.append(f"{task}, {called}: {cells}")
    return lines


def _method_row(name: str, figures: Mapping[str, Any]) -> list[str]:
    speed_up = figures["speed_up"]
    interval = speed_up and f"{speed_up['low']:.2f} to {speed_up['high']:.2f}"
    return [
        name,
        *(_times(speed_up, "total"), interval or _NONE),
        _number(figures["goodput"]),
        _cell(figures, "tokens_per_step"),
        _verdicts(name, figures),
        str(figures["num_failed"]) if figures["num_failed"] else _NONE,
    ]


def _detail_row(name: str, figures: Mapping[str, Any]) -> list[str]:
    speed_up = figures["speed_up"]
    return [
        name,
        *(_times(speed_up, key) for key in ("mean", "median")),
        *(_quartiles(speed_up), _times(speed_up, "min"), _rounds(figures)),
        _number(_per_query(figures)),
        _number(figures["ms_per_token"]),
        _megabytes(figures.get("table_bytes")),
    ]


def _told(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the columns that say nothing of any method."""
    kept = [n for n in range(len(head)) if any(row[n] != _NONE for row in rows)]
    return [head[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _verdicts(name: str, figures: Mapping[str, Any]) -> str:
    counts = [figures[key] for key in ("num_same", "num_near_ties", "num_different")]
    if name == STOCK or not sum(counts):
        return _NONE
    identical, near_ties, different = counts
    more = [f"{near_ties} near-ties"] * bool(near_ties) + [f"{different} DIFFERENT"] * bool(
        different
    )
    return " + ".join([f"{identical} of {sum(counts)}", *more])


def _value(figures: Mapping[str, Any], figure: str) -> float | None:
    value: Any = figures[figure]
    total: float | None = value["total"] if isinstance(value, Mapping) else value
    return total


def _cell(figures: Mapping[str, Any], figure: str) -> str:
    """Tokens per step come with the queries that a step asked for them."""
    value = _value(figures, figure)
    if value is None:
        return _NONE
    if figure == "speed_up":
        return f"{value:.2f}x"
    queries = figures["queries_per_step"]
    return f"{value:.2f}" if queries is None else f"{value:.2f} ({queries:.0f})"


def _per_query(figures: Mapping[str, Any]) -> float | None:
    """Tokens that a verified node, or a branch's, brings on average."""
    queries = figures["queries_per_step"]
    return figures["tokens_per_step"] / queries if queries else None


def _megabytes(num_bytes: int | None) -> str:
    return f"{num_bytes / 1e6:.1f}" if num_bytes else _NONE


def _quartiles(speed_up: Mapping[str, float] | None) -> str:
    return _NONE if speed_up is None else f"{speed_up['q1']:.2f} to {speed_up['q3']:.2f}"


def _rounds(figures: Mapping[str, Any]) -> str:
    """The least and the most of the rounds' totals."""
    totals = figures["speed_up_by_round"]
    return f"{min(totals):.2f} to {max(totals):.2f}" if totals else _NONE


def _times(speed_up: Mapping[str, float] | None, key: str) -> str:
    return _NONE if speed_up is None else f"{speed_up[key]:.2f}x"


def _number(value: float | None) -> str:
    """Three digits that count, or all in front of the point."""
    return _NONE if value is None else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _piped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _cells(row: Sequence[str]) -> str:
    first, *rest = (escape(cell) for cell in row)
    return f"<th>{first}</th>" + "".join(f"<td>{cell}</td>" for cell in rest)
