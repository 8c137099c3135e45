"""The pictures of a report: which figures are drawn, how, and in what colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from eval.methods.names import STOCK
from eval.report.charts import Bar, Point, grouped_bars, line_chart, points_chart, stacked_bars
from eval.report.rows import Answer, Numbers, Record
from eval.report.statistics import OVERALL, pooled
from eval.report.svg import Colors
from selfspec.cost import CostCurve

_METHOD_COLORS = {
    "stock": "#8a919a",
    "stock-static": "#57606a",
    "prompt-lookup": "#0072b2",
    "assisted": "#56b4e9",
    "lut-static": "#e69f00",
    "diaa": "#7a5195",
    "lut-tree": "#b8860b",
    "self-draft": "#8b4513",
    "suffix-branches": "#cc79a7",
    "switch": "#009e73",
    "selfspec": "#d55e00",
}
_MORE_COLORS = (
    *("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#7a5195", "#488f31", "#8b4513", "#2f4b7c", "#b8860b", "#a05195"),
)
_STAGE_COLORS = {
    "prepare": "#7a5195",
    "prefill": "#57606a",
    "forward": "#0072b2",
    "draft": "#d55e00",
    "layout": "#e69f00",
    "verify": "#009e73",
    "commit": "#cc79a7",
    "learn": "#56b4e9",
    "plain": "#8b4513",
    "decoding": "#b6bcc4",
    "rest": "#d4d8dd",
}
_MOST_ACCEPTED = 12  # longer ones are one

Summary = Mapping[str, Any]


class Picture(NamedTuple):
    """A drawing, what it shows, and how to read it."""

    title: str
    svg: str
    note: str


def pictures(summary: Summary, record: Record) -> list[Picture]:
    """Those that there is something to draw for."""
    answers = list(record.answers.values())
    names = list(summary["methods"])
    colors = method_colors(names)  # a method has one in all pictures
    drawers = [
        _speed_ups(summary, colors),
        _widths_and_tokens(summary, colors),
        _accepted(answers, colors),
        _cost(summary),
        _widths(answers, colors),
        _stages(answers, names),
        _sources(answers, colors),
    ]
    return [picture for picture in drawers if picture is not None]


def method_colors(names: Sequence[str]) -> dict[str, str]:
    """The same colour for a method in every report; others take what is left."""
    known = {name: _METHOD_COLORS[name] for name in names if name in _METHOD_COLORS}
    more = cycle(color for color in _MORE_COLORS if color not in known.values())
    return {name: known.get(name) or next(more) for name in names}


def _only(colors: Colors, names: Iterable[str]) -> Colors:
    """For a legend of those that are drawn, in the order of all."""
    drawn = set(names)
    return {name: color for name, color in colors.items() if name in drawn}


def _speed_ups(summary: Summary, colors: Colors) -> Picture | None:
    groups: dict[str, dict[str, Bar]] = {}
    for name, parts in summary["methods"].items():
        for task, figures in parts.items():
            if figures["speed_up"] is not None:
                bar = Bar(*(figures["speed_up"][key] for key in ("total", "low", "high")))
                groups.setdefault(task, {})[name] = bar
    if not groups:
        return None
    drawn = [name for series in groups.values() for name in series]
    label = "Speed-up over stock by task"
    svg = grouped_bars(groups, _only(colors, drawn), label=label, unit="x", base=1.0)
    note = "All tokens of a task together; the thin line is where 95 % of resamplings put it."
    return Picture(label, svg, note)


def _widths_and_tokens(summary: Summary, colors: Colors) -> Picture | None:
    points = []
    for name, parts in summary["methods"].items():
        for task, figures in parts.items():
            nodes = 1.0 if name == STOCK else figures["queries_per_step"]
            if nodes is not None and figures["tokens_per_step"] is not None:
                is_main = task == OVERALL
                points.append(Point(nodes, figures["tokens_per_step"], name, task, is_main))
    if len({point.series for point in points}) < 2:
        return None
    label = "Tokens per step against the width of a step"
    axes = {"x_title": "queries a step: nodes, and what branches ask", "y_title": "tokens per step"}
    note = (
        "A large dot is a method over all questions, a small one a task. Stock's own drafters "
        "don't say how wide their forwards are."
    )
    return Picture(label, points_chart(points, colors, label=label, **axes), note)


def _accepted(answers: Sequence[Answer], colors: Colors) -> Picture | None:
    lines = {}
    for name in colors:
        lengths = pooled(answers, name, "accepted_lengths")
        if lengths:
            lines[name] = _shares(lengths)
    if not lines:
        return None
    label = "Drafts accepted in a step"
    is_cut = any(_MOST_ACCEPTED in line for line in lines.values())
    more = f" ({_MOST_ACCEPTED}: that many or more)" if is_cut else ""
    axes = {"unit": " %", "x_title": f"drafts accepted{more}"}
    note = "Share of the steps. 0 is a step that gained nothing over plain decoding."
    return Picture(label, line_chart(lines, _only(colors, lines), label=label, **axes), note)


def _shares(lengths: Mapping[int, int]) -> dict[float, float]:
    """Per cent of the steps, from 0 to the longest, what is longer than fits in the last one."""
    longest = min(max(lengths), _MOST_ACCEPTED)
    counts: dict[float, float] = dict.fromkeys(range(longest + 1), 0.0)
    for length, count in lengths.items():
        counts[min(length, _MOST_ACCEPTED)] += 100 * count / sum(lengths.values())
    return counts


def _cost(summary: Summary) -> Picture | None:
    if summary["curve"] is None:
        return None
    curve = CostCurve.from_dict(summary["curve"])
    points: dict[float, float] = {width: curve.relative(width) for width in curve.widths}
    label = "What a forward costs by its width"
    note = (
        f"In plain steps, on this machine, behind {summary['curve']['num_columns']} tokens. A "
        f"plain step takes {1000 * curve.seconds(1):.3g} ms. A width pays where it brings more "
        "tokens than this."
    )
    axes = {"unit": "", "x_title": "queries of the forward"}
    colors = {"cost": _METHOD_COLORS["selfspec"]}
    return Picture(label, line_chart({"cost": points}, colors, label=label, **axes), note)


def _widths(answers: Sequence[Answer], colors: Colors) -> Picture | None:
    found = {name: pooled(answers, name, "widths") for name in colors}
    drawn = {name: widths for name, widths in found.items() if widths}
    if not drawn:
        return None
    widest = max(max(widths) for widths in drawn.values())
    groups = {
        _bin_name(low, high): {
            name: Bar(100 * sum(n for w, n in widths.items() if low <= w <= high) / widths.total())
            for name, widths in drawn.items()
        }
        for low, high in _bins(widest)
    }
    label = "The widths that were chosen"
    svg = grouped_bars(groups, _only(colors, drawn), label=label, unit=" %", base=0.0)
    return Picture(label, svg, "Share of the steps by the nodes of their trees, the root included.")


def _bins(widest: int) -> list[tuple[int, int]]:
    """1, 2, 3 to 4, 5 to 8, and so on, up to the widest."""
    ends = [2**power for power in range((widest - 1).bit_length() + 1)]
    return [(low + 1, high) for low, high in zip([0, *ends], ends, strict=False)]


def _bin_name(low: int, high: int) -> str:
    return str(high) if low == high else f"{low} to {high}"


def _stages(answers: Sequence[Answer], names: Sequence[str]) -> Picture | None:
    rows = {}
    for name in names:
        given = [a.numbers for a in answers if a.method == name and a.numbers is not None]
        tokens = sum(numbers.num_new_tokens for numbers in given)
        if tokens:
            seconds = _by_stage(given)
            rows[name] = {stage: 1000 * spent / tokens for stage, spent in seconds.items()}
    if not rows:
        return None
    used = sorted({stage for parts in rows.values() for stage in parts}, key=_place)
    taken = {_STAGE_COLORS.get(stage) for stage in used}
    more = cycle(color for color in _MORE_COLORS if color not in taken)
    colors = {stage: _STAGE_COLORS.get(stage) or next(more) for stage in used}
    label = "Where the time goes"
    svg = stacked_bars(rows, colors, label=label, x_title="ms for each new token")
    note = (
        "The prompt's forward is in it. Stock's own methods don't tell the stages of decoding "
        "apart. On a GPU a forward is waited for where its result is first read."
    )
    return Picture(label, svg, note)


def _by_stage(given: Sequence[Numbers]) -> dict[str, float]:
    """Seconds of each stage, and what is left of the whole calls."""
    stages: Counter[str] = Counter()
    for numbers in given:
        stages.update(numbers.stage_seconds or {"prefill": numbers.prefill_seconds})
    left = sum(numbers.seconds for numbers in given) - sum(stages.values())
    stages["rest" if len(stages) > 1 else "decoding"] += max(left, 0)  # type: ignore[assignment]
    return {stage: stages[stage] for stage in sorted(stages, key=_place)}


def _place(stage: str) -> int:
    """In the order of the colours, and what has none behind."""
    order = list(_STAGE_COLORS)
    return order.index(stage) if stage in order else len(order)


def _sources(answers: Sequence[Answer], colors: Colors) -> Picture | None:
    groups: dict[str, dict[str, Bar]] = {}
    for name in colors:
        accepted = pooled(answers, name, "accepted_by_source")
        steps = sum(pooled(answers, name, "accepted_lengths").values())
        for source, count in sorted(accepted.items()):
            groups.setdefault(source, {})[name] = Bar(count / max(steps, 1))
    if not groups:
        return None
    drawn = [name for series in groups.values() for name in series]
    label = "Where accepted tokens came from"
    svg = grouped_bars(groups, _only(colors, drawn), label=label, unit="", base=0.0)
    note = "Accepted drafts a step that each source named; one that two named counts for both."
    return Picture(label, svg, note)
