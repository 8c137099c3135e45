"""The pictures of a report: which figures are drawn, how, and in what colours."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.methods.names import OURS, STOCK
from eval.report.rows import Record
from eval.report.statistics import OVERALL, STAGES, is_busy, pooled
from eval.report.steps import curve_of

_METHOD_COLORS = {STOCK: "#8a919a", OURS: "#d55e00", "prompt-lookup": "#0072b2"}
_COLORS = (  # of other methods, and of the stages of a step
    *("#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#7a5195", "#b8860b", "#8b4513"),
    *("#2f4b7c", "#488f31", "#a05195", "#57606a", "#00a6a6", "#f27ea9", "#c0392b", "#9acd32"),
    *("#1f1f1f", "#ffd166", "#87603e", "#6a4c93", "#7f8c3d", "#4dd0e1"),
)
_STAGES = ("prepare", "prefill", *STAGES, "decoding", "rest")
_FIXED = {"forward": "#0072b2", "decoding": "#b6bcc4", "rest": "#d4d8dd"}
_LABEL = 0.25  # The height of a name beside a picture, in inches.
_NEAR = 0.07  # Of dots this near, as a share of the height, only the upper one is named.
_MOST_ACCEPTED = 12  # Steps that accept more are counted with these.
_STYLE: dict[str, Any] = {  # Names are drawn as shapes, so that every viewer shows them alike.
    "svg.fonttype": "path",
    "svg.hashsalt": "selfspec",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e7eaee",
    "legend.frameon": False,
}

Summary = Mapping[str, Any]
Colors = Mapping[str, str]


class Picture(NamedTuple):
    """A drawing, what it shows, and how to read it."""

    title: str
    svg: str
    note: str = ""


def drawn(
    title: str, draw: Callable[[Axes], Any], *, x: str, y: str, note: str = "", height: float = 3.8
) -> Picture:
    """A picture with its title, its axes' names with units, and the names of what it shows."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set(title=title, xlabel=x, ylabel=y)
        if labels := axes.get_legend_handles_labels()[1]:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
            figure.set_figheight(max(height, 0.6 + _LABEL * len(labels)))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    return Picture(title, svg[svg.index("<svg") :], note)


def lines(
    title: str, found: Mapping[str, Mapping[float, float]], colors: Colors, **axes: Any
) -> Picture:
    """A line with its points for each name, from 0 up."""

    def draw(on: Axes) -> None:
        for name, points in found.items():
            x, y = zip(*sorted(points.items()), strict=True)
            on.plot(x, y, "o-", ms=4, label=name, c=colors[name], clip_on=False)
        on.set_ylim(bottom=0)
        if all(float(x).is_integer() for points in found.values() for x in points):
            on.xaxis.set_major_locator(MaxNLocator("auto", integer=True))

    return drawn(title, draw, **axes)


def pictures(summary: Summary, record: Record) -> list[Picture]:
    """Those that there is something to draw for."""
    answers, names = record.frame, list(summary["methods"])
    colors = method_colors(names)  # a method has one in all pictures
    found = [
        _speed_ups(summary, colors),
        _widths_and_tokens(summary, colors),
        _accepted(answers, colors),
        _cost(summary),
        None if is_busy(summary["processor_share"]) else _stages(answers, names),
        _sources(answers, colors),
    ]
    return [picture for picture in found if picture is not None]


def method_colors(names: Iterable[str]) -> dict[str, str]:
    """Those that most reports have keep their colour; others take what is left, in their order."""
    more = cycle(_COLORS)
    return {name: _METHOD_COLORS.get(name) or next(more) for name in names}


def _bars(on: Axes, frame: pd.DataFrame, colors: Colors, **more: Any) -> None:
    """A group of bars for each row, one a column."""
    shown = [colors[name] for name in frame.columns]
    frame.plot.bar(ax=on, color=shown, width=0.8, rot=0, legend=False, **more)
    on.grid(visible=False, axis="x")
    if sum(map(len, frame.index)) > 60:
        on.tick_params(axis="x", rotation=25)


def _speed_ups(summary: Summary, colors: Colors) -> Picture | None:
    found = {
        name: {task: part["speed_up"] for task, part in parts.items() if part["speed_up"]}
        for name, parts in summary["methods"].items()
    }
    found = {name: parts for name, parts in found.items() if parts}
    if not found:
        return None
    tables = {
        end: pd.DataFrame({n: {t: s[end] for t, s in parts.items()} for n, parts in found.items()})
        for end in ("total", "low", "high")
    }
    total = tables["total"]
    errors = [
        [(total[name] - tables["low"][name]).clip(0), (tables["high"][name] - total[name]).clip(0)]
        for name in total
    ]

    def draw(on: Axes) -> None:
        _bars(on, total, colors, yerr=errors, error_kw={"elinewidth": 1})
        on.axhline(1, color="#57606a", lw=1, label="stock")

    note = (
        "Stock's seconds over the method's, all tokens of a task together; the thin line is where "
        "95 % of resamplings put it."
    )
    y = "speed-up over stock (times)"
    return drawn("Speed-up over stock by task", draw, x="task", y=y, note=note)


def _widths_and_tokens(summary: Summary, colors: Colors) -> Picture | None:
    points: dict[str, list[tuple[float, float, bool]]] = {}
    for name, parts in summary["methods"].items():
        for task, figures in parts.items():
            width = 1.0 if name == STOCK else figures["nodes_per_step"]
            if width is not None and figures["tokens_per_step"] is not None:
                point = width, figures["tokens_per_step"], task == OVERALL
                points.setdefault(name, []).append(point)
    if len(points) < 2:
        return None

    def draw(on: Axes) -> None:
        for name, places in points.items():
            for x, y, is_main in places:
                size, label = (70, name) if is_main else (12, None)
                on.scatter(x, y, s=size, color=colors[name], label=label, clip_on=False)
        on.set(xlim=(0, None), ylim=(0, None))
        for name, place in _named(points, on.get_xlim()[1], on.get_ylim()[1]).items():
            on.annotate(name, place, xytext=(7, 4), textcoords="offset points", size=8)

    note = (
        "A large dot is a method over all questions, a small one a task; of those that lie close "
        "together one is named. Stock's own drafters don't say how wide their forwards are."
    )
    x = "nodes per step"
    title = "Tokens per step against the width of a step"
    return drawn(title, draw, x=x, y="tokens per step", note=note)


def _named(
    points: Mapping[str, Sequence[tuple[float, float, bool]]], width: float, height: float
) -> dict[str, tuple[float, float]]:
    """Which of the large dots get their names: those that are apart from others above them."""
    mains = {name: (x, y) for name, some in points.items() for x, y, is_main in some if is_main}
    named: dict[str, tuple[float, float]] = {}
    for name, (x, y) in sorted(mains.items(), key=lambda main: -main[1][1]):
        near = (
            abs(x - a) < 3 * _NEAR * width and abs(y - b) < _NEAR * height
            for a, b in named.values()
        )
        if x > 1 and not any(near):  # What drafts nothing lies in one place.
            named[name] = x, y
    return named


def _accepted(answers: pd.DataFrame, colors: Colors) -> Picture | None:
    lengths = {name: pooled(answers, name, "accepted_lengths") for name in colors}
    found = {name: _shares(counts) for name, counts in lengths.items() if counts}
    if not found:
        return None
    is_cut = any(_MOST_ACCEPTED in line for line in found.values())
    more = f"; {_MOST_ACCEPTED}: that many or more" if is_cut else ""
    note = "0 is a step that gained nothing over plain decoding."
    axes = {"x": f"drafts accepted (tokens{more})", "y": "share of the steps (%)", "note": note}
    return lines("Drafts accepted in a step", found, colors, **axes)


def _shares(lengths: Mapping[int, int]) -> dict[float, float]:
    """Per cent of the steps, from 0 to the longest, what is longer than fits in the last one."""
    counts: dict[float, float] = dict.fromkeys(range(min(max(lengths), _MOST_ACCEPTED) + 1), 0.0)
    for length, count in lengths.items():
        counts[min(length, _MOST_ACCEPTED)] += 100 * count / sum(lengths.values())
    return counts


def _cost(summary: Summary) -> Picture | None:
    if (curve := curve_of(summary)) is None:
        return None
    points: dict[float, float] = {width: curve.relative(width) for width in curve.widths}
    note = (
        f"On this machine, after {summary['curve']['num_columns']} tokens. A plain step takes "
        f"{1000 * curve.seconds(1):.3g} ms. A width pays where it brings more tokens than this."
    )
    axes = {"x": "queries of the forward", "y": "time (plain steps)", "note": note}
    colors = {"a forward": _METHOD_COLORS[OURS]}
    return lines("What a forward costs by its width", {"a forward": points}, colors, **axes)


def _stages(answers: pd.DataFrame, names: Sequence[str]) -> Picture | None:
    found = {}
    for name in names:
        given = answers[(answers.method == name) & answers.seconds.notna()]
        if tokens := given.num_new_tokens.sum():
            found[name] = {stage: 1000 * s / tokens for stage, s in _by_stage(given).items()}
    if not found:
        return None
    frame = pd.DataFrame(found).T.fillna(0)
    known = [stage for stage in _STAGES if stage in frame]
    frame = frame[[*(stage for stage in frame if stage not in known), *known]]
    more = cycle(_COLORS)
    colors = [_FIXED.get(stage) or next(more) for stage in frame]

    def draw(on: Axes) -> None:
        frame.plot.barh(ax=on, stacked=True, color=colors, width=0.7, legend=False)
        for row, total in enumerate(frame.sum(axis=1)):
            on.text(total, row, f" {total:.3g}", va="center")
        on.invert_yaxis()
        on.grid(visible=False, axis="y")
        on.set_xlim(right=1.12 * frame.sum(axis=1).max())

    note = (
        "The prompt's forward is in it. Stock's own methods don't tell the stages of decoding "
        "apart. On a GPU a forward is waited for where its result is first read."
    )
    axes = {"x": "milliseconds per new token", "y": "method", "note": note}
    return drawn("Where the time goes", draw, **axes, height=1.6 + 0.35 * max(len(frame), 6))


def _by_stage(given: pd.DataFrame) -> Counter[str]:
    """Seconds of each stage, and what is left of the whole calls."""
    stages: Counter[str] = Counter()
    for spent, prefill in zip(given.stage_seconds, given.prefill_seconds, strict=True):
        stages.update(spent or ({} if pd.isna(prefill) else {"prefill": prefill}))
    left = given.seconds.sum() - sum(stages.values())
    stages["rest" if len(stages) > 1 else "decoding"] += max(left, 0)
    return stages


def _sources(answers: pd.DataFrame, colors: Colors) -> Picture | None:
    found = {}
    for name in colors:
        steps = sum(pooled(answers, name, "accepted_lengths").values())
        if accepted := pooled(answers, name, "accepted_by_source"):
            found[name] = {source: n / max(steps, 1) for source, n in sorted(accepted.items())}
    if not found:
        return None
    frame = pd.DataFrame(found)
    note = "Drafts that each source named; one that two named counts for both."
    axes: Any = {"x": "source", "y": "accepted drafts per step (tokens)", "note": note}
    return drawn("Where accepted tokens came from", lambda on: _bars(on, frame, colors), **axes)
