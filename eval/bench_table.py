"""How a bench looks on a terminal, in Markdown, and in the JSON at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eval.answers import STOCK, Row
from eval.figures import OVERALL, Bound, Figures, SpeedUp, bound, stage_seconds
from selfspec.cost import WIDTHS, CostCurve
from selfspec.records import GenerationStats

__all__ = [
    "Costs",
    "curve_json",
    "curve_lines",
    "figures_json",
    "figures_table",
    "markdown",
    "row_line",
    "stage_table",
]

_COLUMNS = (
    *("task", "method", "prompts", "tokens", "ms a token", "decoding alone"),
    *("speed-up", "median", "min", "quartiles", "max", "decoding alone"),
    *("tokens per step", "same text"),
)
_ABSENT = "–"


def row_line(row: Row) -> str:
    """One prompt: its tokens, and the time and fate of each answer."""
    stock = row.answers[STOCK]
    cells = []
    for name, answer in sorted(row.answers.items(), key=lambda item: item[0] != STOCK):
        if answer.error is not None:
            cells.append(f"{name} FAILED ({answer.error})")
            continue
        cell = f"{name} {1000 * answer.seconds_per_token:.2f} ms"
        if name != STOCK and stock.error is None:
            cell += f" {stock.seconds_per_token / answer.seconds_per_token:.2f}x"
            cell += "" if answer.same else f" (TEXT DIFFERS at token {answer.differs_at})"
        cells.append(cell)
    num_tokens = max(answer.num_new_tokens for answer in row.answers.values())
    return f"{row.task:<16} {row.id!s:>4} {num_tokens:>4} tokens  " + "  ".join(cells)


def figures_table(figures: Mapping[str, Mapping[str, Figures]], left_out: Mapping[str, str]) -> str:
    """A row for each task and method, the overall ones last; then who was left out, and why.

    `figures` are by method and task.
    """
    tasks = next(iter(figures.values()))
    rows = [
        _figures_cells(task, name, tasks_of[task])
        for task in tasks
        for name, tasks_of in figures.items()
    ]
    absent = [_ABSENT] * (len(_COLUMNS) - 3)
    rows += [[OVERALL, name, f"left out: {reason}", *absent] for name, reason in left_out.items()]
    return markdown([_COLUMNS, *rows])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stage_table(stats: GenerationStats) -> str:
    """The milliseconds of a step by stage, with each one's share; then what belongs to no step."""
    stages = stage_seconds(stats)
    total = sum(stages.values())
    lines = [f"{stats.num_steps} steps, {stats.nodes_per_step:.1f} nodes, ms a step and share:"]
    for stage, seconds in stages.items():
        per_step = 1000 * seconds / max(stats.num_steps, 1)
        lines.append(f"  {stage:<8} {per_step:8.3f} ms {seconds / (total or 1.0):7.2%}")
    lines.append(f"  all but the forward {stats.overhead:.2%}")
    for clock, ms in _call_ms(stats).items():
        lines.append(f"  {clock} {ms:.3f} ms a call")
    if stats.disabled_reason:
        lines.append(f"  not drafted as asked: {stats.disabled_reason}")
    return "\n".join(lines)


class Costs(NamedTuple):
    """T(width) behind `num_columns` of text, for trees of up to `max_nodes`."""

    curve: CostCurve
    num_columns: int
    max_nodes: int

    def bounds(self) -> dict[int, Bound]:
        """What a perfect drafter would reach: within the run's nodes, within all measured."""
        return {width: bound(self.curve, width) for width in (self.max_nodes, WIDTHS[-1])}


def curve_lines(costs: Costs) -> str:
    """T(width) as a table, and the bound that it sets."""
    curve = costs.curve
    rows = [["width", *map(str, curve.widths)]]
    rows.append(["ms", *(f"{1000 * curve.seconds(w):.3f}" for w in curve.widths)])
    rows.append(["plain steps", *(f"{curve.relative(w):.2f}" for w in curve.widths)])
    bounds = (
        f"{each.speed_up:.2f}x at width {each.width} within {width} nodes"
        for width, each in costs.bounds().items()
    )
    return "\n".join(
        [
            f"a forward behind {costs.num_columns} columns:",
            markdown(rows),
            f"bound, decoding alone, every draft right: {', '.join(bounds)}",
        ]
    )


def figures_json(figures: Figures) -> dict[str, Any]:
    """Plain values, rounded; what there is none of is left out."""
    values: dict[str, Any] = {
        "num_prompts": figures.num_prompts,
        "num_failed": figures.num_failed,
        "num_same": figures.num_same,
        "num_new_tokens": figures.num_new_tokens,
        "ms_per_token": round(figures.ms_per_token, 3),
        "prefill_ms": round(figures.prefill_ms, 3),
        "decode_ms_per_token": round(figures.decode_ms_per_token, 3),
    }
    for name in ("speed_up", "decode_speed_up"):
        speed_up: SpeedUp | None = getattr(figures, name)
        if speed_up is not None:
            spread = {key: round(value, 3) for key, value in speed_up.spread._asdict().items()}
            values[name] = {"total": round(speed_up.total, 3), **spread}
    return values if figures.stats is None else {**values, **_stats_json(figures.stats)}


def curve_json(costs: Costs) -> dict[str, Any]:
    """The curve, in milliseconds, and the bounds."""
    curve = costs.curve
    times = {str(width): round(1000 * curve.seconds(width), 4) for width in curve.widths}
    return {
        "curve": {"context": costs.num_columns, "ms": times},
        "bound": {
            str(width): {"speed_up": round(each.speed_up, 3), "width": each.width}
            for width, each in costs.bounds().items()
        },
    }


def _figures_cells(task: str, name: str, figures: Figures) -> list[str]:
    cells = [task, name, str(figures.num_prompts), str(figures.num_new_tokens)]
    if figures.num_failed:
        cells[2] += f" ({figures.num_failed} failed)"
    if not figures.num_prompts:
        return cells + [_ABSENT] * (len(_COLUMNS) - len(cells))
    stats = figures.stats
    return [
        *cells,
        f"{figures.ms_per_token:.2f}",
        f"{figures.decode_ms_per_token:.2f}",
        *_speed_up_cells(figures.speed_up),
        _speed_up_cells(figures.decode_speed_up)[0],
        _ABSENT if stats is None else f"{stats.tokens_per_step:.2f}",
        f"{figures.num_same} of {figures.num_prompts}",
    ]


def _speed_up_cells(speed_up: SpeedUp | None) -> list[str]:
    if speed_up is None:
        return [_ABSENT] * 5
    total, spread = speed_up
    quartiles = f"{spread.q1:.2f}–{spread.q3:.2f}x"
    medians = [f"{total:.2f}x", f"{spread.median:.2f}x", f"{spread.min:.2f}x"]
    return [*medians, quartiles, f"{spread.max:.2f}x"]


def _stats_json(stats: GenerationStats) -> dict[str, Any]:
    steps = max(stats.num_steps, 1)
    stages = stage_seconds(stats)
    values: dict[str, Any] = {
        "tokens_per_step": round(stats.tokens_per_step, 3),
        "nodes_per_step": round(stats.nodes_per_step, 1),
        "queries_per_step": round(stats.queries_per_step, 1),
        "stage_ms": {name: round(1000 * each / steps, 3) for name, each in stages.items()},
        "call_ms": {name: round(ms, 3) for name, ms in _call_ms(stats).items()},
        "overhead": round(stats.overhead, 4),
    }
    if stats.disabled_reason:
        values["disabled_reason"] = stats.disabled_reason
    return values


def _call_ms(stats: GenerationStats) -> dict[str, float]:
    """What is spent once a call: the prompt, and teaching from it where that is told apart."""
    clocks = [name for name in stats.seconds if name not in stage_seconds(stats)]
    return {name: 1000 * stats.seconds[name] / max(stats.num_calls, 1) for name in clocks}
