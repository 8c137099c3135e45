"""The tables of a report, from a summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.methods.names import OURS, PARTS_OF_OURS, STOCK
from eval.methods.reported import REPORTED
from eval.report.statistics import OVERALL, is_busy
from eval.report.summary import trust
from eval.report.table import NONE, Table

_EVEN = 0.01  # differences of 1 % are none
_METHODS = {
    "method": "{name}",
    "speed-up": "{speed_up[total]:.2f}x",
    "95 %": "{speed_up[low]:.2f} to {speed_up[high]:.2f}",
    "tokens/s": "{goodput:n}",
    "tokens per step": "{steps}",
    "same text": "{same}",
    "failed": "{failed}",
}
_STEPS = {
    "task": "{task}",
    "method": "{name}",
    "answers": "{answers}",
    "tokens": "{num_new_tokens}",
    "ms a token": "{ms_per_token:n}",
    "speed-up": "{speed_up[total]:.2f}x",
    "median": "{speed_up[median]:.2f}x",
    "quartiles": "{speed_up[q1]:.2f} to {speed_up[q3]:.2f}",
    "rounds": "{least:.2f} to {most:.2f}",  # of the rounds' totals
    "prompt": "{prefill_speed_up[total]:.2f}x",
    "answer": "{decode_speed_up[total]:.2f}x",
    "by drafts": "{drafting_speed_up[total]:.2f}x",
    "tokens per step": "{steps}",
    "forwards": "{ways}",
    "LUTs, MB": "{tables!m:.1f}",
    "same text": "{same}",
    "largest gap, ulps": "{largest_gap_ulps:.2f}",
}

Summary = Mapping[str, Any]


def methods_table(summary: Summary) -> Table:
    """A row for each method, over all questions: what most readers look for."""
    columns, rows = _METHODS, _overall(summary)
    note = (
        "Speed-up: stock's seconds over the method's, prompts and all, of all questions together, "
        "with the interval in which 95 % of resamplings put it. Tokens per step: in brackets the "
        "nodes of a step. Same text: answers equal to stock's, near-ties and "
        "different ones after them."
    )
    if (reported := REPORTED.get(summary["settings"]["study"])) is not None:
        columns = {**columns, reported.head: "{reported}"}
        rows = [{**row, "reported": reported.figures.get(row["name"])} for row in rows]
        note = f"{note} {reported.note}"
    return Table.of("All questions", columns, rows, note).telling()


def verdict(summary: Summary) -> str:
    """What came of the run, in a sentence or two that come before any table."""
    overall = {name: parts[OVERALL] for name, parts in _taking_part(summary).items()}
    speed_ups = {name: each["speed_up"] for name, each in overall.items() if each["speed_up"]}
    speed_ups.pop(STOCK, None)
    parts = [_stopped(summary)]
    if is_busy(summary["processor_share"]):
        parts.append(trust(summary))
    if speed_ups:
        named = OURS if OURS in speed_ups else max(speed_ups, key=lambda n: speed_ups[n]["total"])
        parts.append(_sentence(named, speed_ups.pop(named), overall[named]))
    others = {name: speed_up for name, speed_up in speed_ups.items() if name not in PARTS_OF_OURS}
    if others:
        best = max(others, key=lambda name: others[name]["total"])
        parts.append(f"The best of the others, {best}: {others[best]['total']:.2f}x.")
    return " ".join(filter(None, parts)) or "No method was compared with stock."


def _stopped(summary: Summary) -> str:
    done, asked = summary["num_done"], summary["num_asked"]
    if done >= asked:
        return ""
    return f"The run was stopped when {done} of {asked} questions were answered."


def _sentence(name: str, speed_up: Mapping[str, float], figures: Mapping[str, Any]) -> str:
    low, high = speed_up["low"], speed_up["high"]
    sure = "" if low > 1 or high < 1 else ", so the difference may be chance"
    same = _verdicts(name, figures)
    texts = f"; the text was stock's in {same}" if same != NONE else ""
    told = f"{name} ran at {speed_up['total']:.2f}x the speed of stock generate()"
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
    methods = _taking_part(summary)
    rows = [
        {**_record(name, parts[task]), "task": task}
        for task in next(iter(methods.values()))
        if any(parts[task]["num_answers"] > 1 for parts in methods.values())
        for name, parts in methods.items()
    ]
    absent = (f"{name} is left out: {why}." for name, why in summary["left_out"].items())
    note = (
        "Speed-up: stock's seconds over the method's, prompts and all; median and quartiles of "
        "single questions (summary.json has their mean, least and most too). Rounds: the totals of "
        "single rounds, from the least to the most. Prompt and answer: the same of the time up to "
        "the end of the prompt's forward, and of all after it. By drafts: over forward-only's "
        "seconds in place of stock's, so no faster forward is in it. Forwards: how they were run "
        "when an answer ended, by answers. A task with a single answer has no row. "
        "Largest gap: by how many steps of the dtype stock preferred its own token, where a text "
        "parts."
    )
    return Table.of("By task, in detail", _STEPS, rows, " ".join([note, *absent])).telling()


def _taking_part(summary: Summary) -> dict[str, Any]:
    """The methods but for those that were left out."""
    methods, left_out = summary["methods"], summary["left_out"]
    return {name: parts for name, parts in methods.items() if name not in left_out}


def _overall(summary: Summary) -> list[dict[str, Any]]:
    """What rows show of all questions."""
    return [_record(name, parts[OVERALL]) for name, parts in _taking_part(summary).items()]


def _record(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """What rows show of a method."""
    totals, failed = figures["speed_up_by_round"], figures["num_failed"]
    return {
        **figures,
        "name": name,
        "answers": str(figures["num_answers"]) + f" ({failed} failed)" * bool(failed),
        "failed": failed or None,
        "least": min(totals, default=None),
        "most": max(totals, default=None),
        "steps": _cell(figures, "tokens_per_step"),
        "same": _verdicts(name, figures),
        "ways": ", ".join(f"{n} {way}" for way, n in figures["forwards"].items()) or None,
        "tables": figures["table_bytes"] or None,
    }


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


def _verdicts(name: str, figures: Mapping[str, Any]) -> str:
    counts = [figures[key] for key in ("num_same", "num_near_ties", "num_different")]
    if name == STOCK or not sum(counts):
        return NONE
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
    """Tokens per step come with the nodes that were verified for them."""
    value = _value(figures, figure)
    if value is None:
        return NONE
    if figure == "speed_up":
        return f"{value:.2f}x"
    nodes = figures["nodes_per_step"]
    return f"{value:.2f}" if nodes is None else f"{value:.2f} ({nodes:.0f})"
