"""What `selfspec demo` and `selfspec check` say: tables, a verdict, and Python to copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.cli.check.stopwatch import DRAFTED, PLAIN, Comparison, TimedAnswer
from selfspec.cli.shared.live_text import OWN, SEVERAL
from selfspec.cli.shared.paint import labels, style_of
from selfspec.config import SpecConfig

if TYPE_CHECKING:
    from selfspec.cli.shared.writer import Writer
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


def print_report(
    console: Console,
    measured: Comparison,
    writer: Writer,
    config: SpecConfig,
    curve: CostCurve | None = None,
) -> int:
    """Prints everything, the verdict and the lines to copy last; returns the exit status.

    Times and speed-ups are left out where they would mislead.
    """
    said = verdict(measured, curve)
    console.print(_origins_table(measured, writer.origins(config)))
    console.print(_figures_table(measured, said))
    if said.is_sure and curve is not None:
        console.print("Cost of a step in plain steps, by its width in tokens:")
        for line in bars(curve):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
    same = print_texts(console, measured)
    console.print(Text(f"\n{said.text}\n", "bold"), soft_wrap=True)
    if writer.asked.model is not None:
        for line in python_lines(writer, measured, said):
            console.print(f"    {line}", markup=False, soft_wrap=True)
    return 0 if same and measured.num_drafted else 1


def verdict(measured: Comparison, curve: CostCurve | None = None) -> Verdict:
    """Is it faster, how sure is that, and if it is not, why not?"""
    busy = _busy(measured)
    if not measured.num_drafted:
        reason = measured.stats(DRAFTED).disabled_reason
        why = reason or busy or "no step was worth a draft here"
        return Verdict(f"Nothing was drafted: {why}.", is_sure=False)
    if busy is not None:
        return Verdict(f"Too busy to say: {busy}.", is_sure=False)
    if measured.num_tokens < _ENOUGH:
        return Verdict(
            f"Too few tokens to say: the answers have {measured.num_tokens} in all, and {_ENOUGH} "
            "are needed; give prompts with longer answers.",
            is_sure=False,
        )
    way, dtype = measured.best_way, measured.dtype
    low, high = measured.interval(way)
    basis = f"{measured.num_rounds} rounds of {measured.num_tokens} tokens"
    singles = [each.speed_up(way) for each in measured.prompts]
    if low >= _GAIN:
        without = f" and the cache ({measured.speed_up(DRAFTED):.2f}x without it)"
        return Verdict(
            f"{measured.speed_up(way):.2f}x faster with selfspec{'' if way == DRAFTED else without}"
            f", in {dtype} ({low:.2f}x to {high:.2f}x in {basis}; single prompts "
            f"{min(singles):.2f}x to {max(singles):.2f}x).{_by_packing(measured)}",
            gains=True,
        )
    if high >= _GAIN:
        return Verdict(
            f"Not sure: {low:.2f}x to {high:.2f}x in {dtype}, in {basis}. A larger --seconds "
            "measures more rounds."
        )
    but = f" Single prompts gain up to {max(singles):.2f}x." if max(singles) >= 1.1 else ""
    return Verdict(
        f"No gain here ({low:.2f}x to {high:.2f}x in {dtype}, in {basis}), because "
        f"{_because(measured, curve)}.{but}"
    )


def _busy(measured: Comparison) -> str | None:
    """Why no time that was measured can be trusted, if that is so."""
    if measured.is_busy:
        return (
            f"this process got {measured.share:.0%} of the processor that it asked for, so other "
            "programs are at work, or torch has more threads than this container has cores. End "
            "them, or set OMP_NUM_THREADS, and run this again"
        )
    if measured.variation > _STEADY:
        return (
            f"two plain runs of one prompt differ by {measured.variation:.0%}. End other programs, "
            "and run this again"
        )
    return None


def _because(measured: Comparison, curve: CostCurve | None) -> str:
    """Why there is no gain."""
    per_step = measured.stats(measured.best_way).tokens_per_step
    if curve is not None and curve.relative(4) > _DEAR:
        return (
            f"wide steps cost too much: one of four tokens takes {curve.relative(4):.1f} plain "
            f"steps, and the steps that were taken brought {per_step:.2f} tokens on average"
        )
    if per_step < _FEW:
        return f"these answers are hard to guess: a step brought {per_step:.2f} tokens"
    reading = sum(each.answers[PLAIN][0].prompt_seconds for each in measured.prompts)
    if reading > _LONG * median(measured.seconds(PLAIN)):
        return "most of the time goes into reading the prompts, which drafts don't shorten"
    return "drafts cost about as much as they save"


def _by_packing(measured: Comparison) -> str:
    """What packed weights bring beside drafts, and what they take."""
    stats = measured.stats(measured.best_way)
    if not stats.packed_bytes or stats.speed_up is None:
        return ""
    return (
        f" Drafts alone bring {stats.speed_up:.2f}x; the rest comes from packed weights, which "
        f"take {stats.packed_bytes / 1e6:.0f} MB more."
    )


def python_lines(writer: Writer, measured: Comparison, said: Verdict) -> list[str]:
    """How to load the model, and how to draft, if that pays."""
    asked = writer.asked
    load = f'model = AutoModelForCausalLM.from_pretrained("{asked.model}", dtype="{writer.dtype}")'
    if asked.max_memory is not None:
        load = f'model = selfspec.load("{asked.model}", max_memory="{asked.max_memory}")'
    if not said.is_sure:
        return []
    if not said.gains:
        return [load, "# and generate() as it is: drafts are not known to gain anything here"]
    if measured.best_way == DRAFTED:
        return [load, "selfspec.attach(model, selfspec.SelfSpec())"]
    spec = f'selfspec.SelfSpec.from_pretrained("{asked.cache}", tokenizer=tokenizer)'
    return [load, f"selfspec.attach(model, {spec})"]


def bars(curve: CostCurve) -> list[str]:
    """A bar for each width of a step, as long as that step is dear."""
    costs = {width: curve.relative(width) for width in curve.widths}
    scale = _LONGEST / max(costs.values())
    return [f"{width:4} {cost:6.2f} {'█' * round(scale * cost)}" for width, cost in costs.items()]


def _origins_table(measured: Comparison, sources: Iterable[str]) -> Table:
    """The share of the tokens that each source drafted, and the model's own."""
    way = measured.ways[-1]
    counts = {
        each.kind: sum((one.origins for one in each.answers[way]), Counter[str]())
        for each in measured.prompts
    }
    seen = (name for each in counts.values() for name in each if name not in (OWN, SEVERAL))
    names = {**labels(dict.fromkeys([*sources, *seen])), OWN: "model's own"}
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("tokens came from")
    for origin, label in names.items():
        table.add_column(label, style=style_of(origin), justify="right")
    for kind, each in counts.items():
        shares = (f"{each[origin] / max(each.total(), 1):.0%}" for origin in names)
        table.add_row(kind, *shares)
    return table


def _figures_table(measured: Comparison, said: Verdict) -> Table:
    """A row for each prompt, and one for all of them."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_footer=True)
    everything = [answer for each in measured.prompts for answer in each.answers[PLAIN]]
    table.add_column("prompt", "all")
    table.add_column("tokens", str(measured.num_tokens), justify="right")
    if said.is_sure:
        table.add_column("plain,\ntokens/s", _rate(everything), justify="right")
    for way in measured.ways:
        per_step = f"{measured.stats(way).tokens_per_step:.2f}"
        title = "tokens\na step" if way == DRAFTED else f"{way},\na step"
        table.add_column(title, per_step, justify="right")
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


def _rate(answers: Sequence[TimedAnswer]) -> str:
    """Tokens a second behind the prompts."""
    tokens = sum(len(each.new_ids) - 1 for each in answers)
    return f"{tokens / max(sum(each.answer_seconds for each in answers), 1e-9):.1f}"


def print_texts(console: Console, measured: Comparison) -> bool:
    """Says how many texts are those of plain `generate()`; False if one differs that must not."""
    parted = [each for each in measured.prompts if each.parts_at is not None]
    total = len(measured.prompts)
    same = f"{total - len(parted)} of {total} are plain generate()'s, token for token"
    if not parted:
        console.print(Text(f"Same text: {same}.", "green"))
        return True
    where = ", ".join(f"{each.kind} at token {(each.parts_at or 0) + 1}" for each in parted)
    if measured.dtype == "float32":
        line = (
            f"NOT the same text: {same}. Others part ({where}). In float32 that is right only "
            "where two tokens are as likely as rounding can tell; please report it."
        )
        console.print(Text(line, "bold red"))
        return False
    line = (
        f"In {measured.dtype} a wider forward rounds differently, so texts may part where two "
        f"tokens are almost equally likely: {same} ({where})."
    )
    console.print(Text(line, "yellow"))
    return True
