"""What `selfspec demo` and `selfspec check` say: tables, a verdict, and Python to copy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.cli.check.stopwatch import DRAFTED, PLAIN, Answer, Measured
from selfspec.cli.shared.live_text import OWN
from selfspec.cli.shared.paint import labels, style_of
from selfspec.cli.shared.text_files import write_text
from selfspec.cost import CostCurve

_GAIN = 1.03  # Less than that is no gain.
_ENOUGH = 96  # tokens of one answer to each prompt
_STEADY = 0.25  # The machine is too busy if plain runs of one prompt differ by more than this.
_DEAR = 1.5  # plain steps for a step of four nodes
_FEW = 1.15  # tokens a step
_LONG = 0.5  # of the time, for reading prompts
_LONGEST = 50  # The longest bar of a picture, in characters.


class Verdict(NamedTuple):
    """What the figures say, and whether the speed-ups can be trusted."""

    text: str
    is_sure: bool = True  # False: no speed-up is printed.
    gains: bool = False


def verdict(found: Sequence[Measured]) -> Verdict:
    """Is it faster, in which precision, how sure is that, and if it is not, why not?"""
    best, busy = fastest(found), _busy(found)
    if not any(each.num_drafted for each in found):
        why = best.stats(DRAFTED).disabled_reason or busy or "no step was worth a draft here"
        return Verdict(f"Nothing was drafted: {why}.", is_sure=False)
    if busy is not None:
        return Verdict(f"Too busy to say: {busy}.", is_sure=False)
    if best.num_tokens < _ENOUGH:
        return Verdict(
            f"Too few tokens to say: the answers have {best.num_tokens} in all, and {_ENOUGH} are "
            "needed; give prompts with longer answers.",
            is_sure=False,
        )
    way = best.best_way
    low, high = min(best.speed_ups(way)), max(best.speed_ups(way))
    basis = f"{best.num_rounds} rounds of {best.num_tokens} tokens"
    singles = [each.speed_up(way) for each in best.prompts]
    if low >= _GAIN:
        alone = f"{best.speed_up(DRAFTED):.2f}x"
        using = "" if way == DRAFTED else f" and the cache ({alone} without it)"
        return Verdict(
            f"{best.speed_up(way):.2f}x faster with selfspec{using}, in {best.dtype} ({low:.2f}x "
            f"to {high:.2f}x in {basis}; single prompts {min(singles):.2f}x to "
            f"{max(singles):.2f}x).{_by_packing(best)}",
            gains=True,
        )
    if high >= _GAIN:
        return Verdict(
            f"Not sure: {low:.2f}x to {high:.2f}x in {best.dtype}, in {basis}. A larger --seconds "
            "measures more rounds."
        )
    but = f" Single prompts gain up to {max(singles):.2f}x." if max(singles) >= 1.1 else ""
    return Verdict(
        f"No gain here ({low:.2f}x to {high:.2f}x in {best.dtype}, in {basis}), because "
        f"{_because(best)}.{but}"
    )


def fastest(found: Sequence[Measured]) -> Measured:
    """The precision in which the answers came soonest."""
    return min(found, key=lambda each: each.seconds_a_token)


def _busy(found: Sequence[Measured]) -> str | None:
    """Why no time that was measured can be trusted, if that is so."""
    if any(each.is_busy for each in found):
        share = min(each.share for each in found)
        return (
            f"this process got {share:.0%} of the processor that it asked for, so other programs "
            "are at work, or torch has more threads than this container has cores. End them, or "
            "set OMP_NUM_THREADS, and run this again"
        )
    variation = max(each.variation for each in found)
    if variation > _STEADY:
        return (
            f"two plain runs of one prompt differ by {variation:.0%}. End other programs, and run "
            "this again"
        )
    return None


def _because(best: Measured) -> str:
    """Why there is no gain."""
    stats = best.stats(best.best_way)
    per_step = stats.tokens_per_step
    if best.curve is not None and best.curve.relative(4) > _DEAR:
        return (
            f"wide steps cost too much: one of four tokens takes {best.curve.relative(4):.1f} "
            f"plain steps, and the steps that were taken brought {per_step:.2f} tokens on average"
        )
    if per_step < _FEW:
        return f"these answers are hard to guess: a step brought {per_step:.2f} tokens"
    reading = sum(each.answers[PLAIN][0].prompt_seconds for each in best.prompts)
    if reading > _LONG * median(best.seconds(PLAIN)):
        return "most of the time goes into reading the prompts, which drafts don't shorten"
    return "drafts cost about as much as they save"


def _by_packing(best: Measured) -> str:
    """What packed weights bring beside drafts, and what they take."""
    stats = best.stats(best.best_way)
    if not stats.packed_bytes or stats.speed_up is None:
        return ""
    return (
        f" Drafts alone bring {stats.speed_up:.2f}x; the rest comes from packed weights, which "
        f"take {stats.packed_bytes / 1e6:.0f} MB more."
    )


def python_lines(
    name: str, best: Measured, said: Verdict, cache: str | None, max_memory: str | None
) -> list[str]:
    """How to load the model as it was fastest, and how to draft, if that pays."""
    if not said.is_sure:
        return []
    load = f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="{best.dtype}")'
    if max_memory is not None:
        load = f'model = selfspec.load_streamed("{name}", max_memory="{max_memory}")'
    if not said.gains:
        return [load, "# and generate() as it is: drafts are not known to gain anything here"]
    if best.best_way == DRAFTED:
        return [load, "selfspec.attach(model, selfspec.SelfSpec())"]
    spec = f'selfspec.SelfSpec.from_pretrained("{cache}", tokenizer=tokenizer)'
    return [load, f"selfspec.attach(model, {spec})"]


def print_figures(console: Console, found: Sequence[Measured], said: Verdict) -> None:
    """The tables. Times and speed-ups are left out where they would mislead."""
    for each in found:
        console.print(_table(each, said))
    best = fastest(found)
    if said.is_sure and best.curve is not None:
        console.print(f"Cost of a step in plain steps, by its width in tokens ({best.dtype}):")
        for line in bars(best.curve):
            console.print(line, markup=False, soft_wrap=True)
        console.print()


def bars(curve: CostCurve) -> list[str]:
    """A bar for each width of a step, as long as that step is dear."""
    costs = {width: curve.relative(width) for width in curve.widths}
    scale = _LONGEST / max(costs.values())
    return [f"{width:4} {cost:6.2f} {'█' * round(scale * cost)}" for width, cost in costs.items()]


def origins_table(measured: Measured, sources: Iterable[str]) -> Table:
    """The share of the tokens that each source drafted, and the model's own."""
    names = {**labels(sources), OWN: "model's own"}
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("where tokens came from")
    for origin, label in names.items():
        table.add_column(label, style=style_of(origin), justify="right")
    for each in measured.prompts:
        counts = sum((one.origins for one in each.answers[DRAFTED]), Counter[str]())
        shares = (f"{counts[origin] / max(counts.total(), 1):.0%}" for origin in names)
        table.add_row(each.kind, *shares)
    return table


def _table(measured: Measured, said: Verdict) -> Table:
    """A row for each prompt, and one for all of them."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_footer=True)
    everything = [answer for each in measured.prompts for answer in each.answers[PLAIN]]
    table.add_column(measured.dtype, "all")
    table.add_column("tokens", str(measured.num_tokens), justify="right")
    if said.is_sure:
        table.add_column("plain, tokens/s", _rate(everything), justify="right")
    for way in measured.ways:
        per_step = f"{measured.stats(way).tokens_per_step:.2f}"
        name = "" if way == DRAFTED else f"{way}: "
        table.add_column(f"{name}tokens a step", per_step, justify="right")
        if said.is_sure:
            table.add_column("speed-up", f"{measured.speed_up(way):.2f}x", justify="right")
    for each in measured.prompts:
        plain = each.answers[PLAIN]
        cells = [str(len(plain[0].new_ids)), *([_rate(plain)] if said.is_sure else [])]
        for way in measured.ways:
            stats = each.answers[way][0].stats
            cells.append(f"{stats.tokens_per_step:.2f}" if stats.num_steps else "-")
            cells += [f"{each.speed_up(way):.2f}x"] if said.is_sure else []
        table.add_row(each.kind, *cells)
    return table


def _rate(answers: Sequence[Answer]) -> str:
    """Tokens a second behind the prompts."""
    tokens = sum(len(each.new_ids) - 1 for each in answers)
    return f"{tokens / max(sum(each.answer_seconds for each in answers), 1e-9):.1f}"


def print_texts(console: Console, found: Sequence[Measured]) -> bool:
    """Says how many texts are those of plain `generate()`; False if one differs that must not."""
    is_allowed = True
    for measured in found:
        parted = [each for each in measured.prompts if each.parts_at is not None]
        total = len(measured.prompts)
        same = f"{total - len(parted)} of {total} are plain generate()'s, token for token"
        if not parted:
            console.print(Text(f"Same text: {same} ({measured.dtype}).", "green"))
            continue
        where = ", ".join(f"{each.kind} at token {(each.parts_at or 0) + 1}" for each in parted)
        if measured.dtype == "float32":
            is_allowed = False
            line = (
                f"NOT the same text: {same}. Others part ({where}). In float32 that is right only "
                "where two tokens are as likely as rounding can tell; please report it."
            )
        else:
            line = (
                f"In {measured.dtype} a wider forward rounds differently, so texts may part where "
                f"two tokens are almost equally likely: {same} ({where})."
            )
        console.print(Text(line, "yellow" if is_allowed else "bold red"))
    return is_allowed


def write_json(path: Path, name: str, about: Mapping[str, Any], found: Sequence[Measured]) -> None:
    """Writes all figures."""
    values = {"model": name, **about, "precisions": [_as_json(each) for each in found]}
    write_text(path, "--output", json.dumps(values, indent=1) + "\n")


def _as_json(found: Measured) -> dict[str, Any]:
    curve = found.curve
    return {
        "dtype": found.dtype,
        "num_rounds": found.num_rounds,
        "share_of_processor": found.share,
        "variation": found.variation,
        "speed_ups": {way: found.speed_ups(way) for way in found.ways},
        "stats": {way: found.stats(way).as_dict() for way in found.ways},
        "cost": {} if curve is None else {width: curve.seconds(width) for width in curve.widths},
        "prompts": [
            {
                "kind": each.kind,
                "num_tokens": len(each.answers[PLAIN][0].new_ids),
                "seconds": {way: each.seconds(way) for way in each.answers},
            }
            for each in found.prompts
        ],
    }
