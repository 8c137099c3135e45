"""Where a step's time goes, what a forward of each width costs, and what that leaves to gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from eval.report.statistics import OVERALL
from eval.report.table import Table
from selfspec import SpecConfig
from selfspec.cost import CostCurve


class Bound(NamedTuple):
    """How much faster than plain decoding drafts can be here, and at which width."""

    speed_up: float
    width: int


def bound(curve: CostCurve, max_width: int) -> Bound:
    """What a perfect drafter reaches at this T(width): max over w of w · T(1) / T(w).

    Each of its forwards verifies a chain of w - 1 drafts, all of them right, and yields w tokens.
    Of decoding alone: the prompt's forward costs everybody the same.

    >>> bound(CostCurve({1: 0.010, 4: 0.010, 8: 0.040}), 8)
    Bound(speed_up=4.0, width=4)
    """
    times = curve.table(max_width)
    found = [Bound(w * times[1] / times[w], w) for w in range(1, max_width + 1)]
    return max(found, key=lambda each: each.speed_up)  # the narrowest of equal ones


def curve_of(summary: Mapping[str, Any]) -> CostCurve | None:
    """What a forward costs by its width; None where it was not measured."""
    line = summary["curve"]
    return line and CostCurve(dict(zip(line["widths"], line["seconds"], strict=True)))


def bounds(summary: Mapping[str, Any]) -> dict[int, Bound]:
    """By the nodes allowed: the run's, and the most that was measured; empty without a curve.

    What no forward has shown sets no bound.
    """
    if (curve := curve_of(summary)) is None:
        return {}
    widest = max(curve.widths)
    max_nodes = SpecConfig.of(**summary["settings"]["knobs"]).max_nodes
    return {width: bound(curve, width) for width in (min(max_nodes, widest), widest)}


def curve_table(summary: Mapping[str, Any]) -> Table | None:
    """T(width), and the bound that it sets; None where it was not measured."""
    if (curve := curve_of(summary)) is None:
        return None
    rows = [
        ["ms", *(f"{1000 * curve.seconds(width):.3f}" for width in curve.widths)],
        ["plain steps", *(f"{curve.relative(width):.2f}" for width in curve.widths)],
    ]
    told = (
        f"{bound.speed_up:.2f}x at width {bound.width} within {width} nodes"
        for width, bound in bounds(summary).items()
    )
    note = f"Bound, decoding alone, every draft right: {', '.join(told)}."
    title = f"A forward after {summary['curve']['num_columns']} tokens"
    return Table(title, ["width", *map(str, curve.widths)], rows, note)


def stages_table(summary: Mapping[str, Any]) -> Table | None:
    """Milliseconds of a step by stage, a column for each method that counts them; None: nobody."""
    overall = {name: parts[OVERALL] for name, parts in summary["methods"].items()}
    taking_part = overall.keys() - summary["left_out"].keys()
    counted = {n: each for n, each in overall.items() if n in taking_part and each["call_ms"]}
    if not counted:
        return None
    stages = dict.fromkeys(stage for each in counted.values() for stage in each["stage_ms"])
    clocks = dict.fromkeys(clock for each in counted.values() for clock in each["call_ms"])
    rows = [[stage, *(_share(each, stage) for each in counted.values())] for stage in stages]
    rows.append(["all but the forward", *(_percent(each["overhead"]) for each in counted.values())])
    rows.append(["nodes", *(f"{each['nodes_per_step']:.1f}" for each in counted.values())])
    for clock in clocks:
        times = (each["call_ms"].get(clock, 0.0) for each in counted.values())
        rows.append([f"{clock}, a call", *(f"{ms:.3f}" for ms in times)])
    reasons = {name: each["disabled_reason"] for name, each in counted.items()}
    told = (f"{name} did not draft in trees: {why}." for name, why in reasons.items() if why)
    return Table("A step by stage, ms", ["stage", *counted], rows, " ".join(told))


def _share(figures: Mapping[str, Any], stage: str) -> str:
    ms, total = figures["stage_ms"].get(stage, 0.0), sum(figures["stage_ms"].values())
    return f"{ms:.3f} ({_percent(ms / total if total else None)})"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
