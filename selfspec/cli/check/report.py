"""What `selfspec check` and `selfspec demo` say: a table, a verdict, and Python to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.cli.check.stopwatch import CACHED, DRAFTED, STOCK, Comparison

if TYPE_CHECKING:
    from selfspec.cli.shared.writer import Writer
    from selfspec.cost import CostCurve

_GAIN = 1.03  # Less than that is no gain.
_ENOUGH = 96  # tokens of one answer to each prompt
_DEAR = 1.5  # plain steps for a step of four nodes
_FEW = 1.15  # tokens a step


class Verdict(NamedTuple):
    """What the figures say, and whether the times can be trusted."""

    text: str
    is_sure: bool = True  # False: no time is printed.
    gains: bool = False


def print_report(
    console: Console, measured: Comparison, writer: Writer, curve: CostCurve | None
) -> int:
    """Prints everything, the verdict and the lines to copy last; returns the exit status.

    Times and speed-ups are left out where they would mislead.
    """
    said = verdict(measured, curve)
    is_wrong = measured.dtype == "float32" and bool(measured.parted)
    console.print(_table(measured, with_times=said.is_sure))
    if said.is_sure and curve is not None:
        costs = ", ".join(f"{width}: {curve.relative(width):.2f}" for width in curve.widths)
        console.print(f"Cost of a step by its width in tokens, in plain steps: {costs}")
    console.print(Text(about_texts(measured, is_wrong), "bold red" if is_wrong else ""))
    console.print(Text(f"\n{said.text}\n", "bold"), soft_wrap=True)
    is_check = writer.asked.model is not None  # The demo shows its drafts, whatever they bring.
    if said.gains and is_check:
        for line in python_lines(writer, measured.best_way):
            console.print(f"    {line}", markup=False, soft_wrap=True)
    return 1 if is_wrong or not measured.num_drafted or (is_check and measured.is_busy) else 0


def verdict(measured: Comparison, curve: CostCurve | None = None) -> Verdict:
    """Is it faster, how sure is that, and if it is not, why not?"""
    if not measured.num_drafted:
        stats = measured.ways[DRAFTED].total()
        why = stats.disabled_reason or stats.paused or "no step was worth a draft"
        more = f" {too_busy(measured.share)}" if measured.is_busy else ""
        return Verdict(f"Nothing was drafted: {why}.{more}", is_sure=False)
    if measured.is_busy:
        return Verdict(too_busy(measured.share), is_sure=False)
    num_tokens = sum(measured.lengths.values())
    if num_tokens < _ENOUGH:
        return Verdict(
            f"Too few tokens to say: the answers have {num_tokens} in all, and {_ENOUGH} are "
            "needed; give prompts with longer answers.",
            is_sure=False,
        )
    way = measured.best_way
    total, (low, high) = measured.ways[way].total(), measured.interval(way)
    basis = (
        f"{low:.2f}x to {high:.2f}x in {len(measured.ways[way].stats)} rounds of {num_tokens} "
        f"tokens, in {measured.dtype}"
    )
    if low >= _GAIN:
        without = f" and the cache, {measured.speed_up(DRAFTED):.2f}x without it"
        text = f"{measured.speed_up(way):.2f}x faster with selfspec"
        text += f"{without if way == CACHED else ''} ({basis})."
        alone = total.speed_up
        if total.packed_bytes and alone is not None and alone < measured.speed_up(way):
            text += (
                f" Drafts alone bring {alone:.2f}x; the rest comes from packed weights, "
                f"which take {total.packed_bytes / 1e6:.0f} MB more."
            )
        return Verdict(text, gains=True)
    if high >= _GAIN:
        return Verdict(f"Not sure: {basis}. A larger --seconds measures more rounds.")
    why = "drafts cost about as much as they save"
    if curve is not None and curve.relative(4) > _DEAR:
        why = f"a step of four tokens takes {curve.relative(4):.1f} plain steps"
    elif total.tokens_per_step < _FEW:
        why = f"these answers are hard to guess: a step brought {total.tokens_per_step:.2f} tokens"
    return Verdict(f"No gain here ({basis}): {why}. Use generate() as it is.")


def too_busy(share: float) -> str:
    """Why no time is told."""
    return (
        f"Too busy to say: this process got {share:.0%} of the processor that it asked for, so "
        "other programs are at work, or torch has more threads than this container has cores. End "
        "them, or set OMP_NUM_THREADS, and run this again."
    )


def python_lines(writer: Writer, way: str) -> list[str]:
    """How to load the model, and how to draft."""
    asked = writer.asked
    load = f'AutoModelForCausalLM.from_pretrained("{asked.model}", dtype="{writer.dtype}")'
    if asked.max_memory is not None:
        load = f'selfspec.load("{asked.model}", max_memory="{asked.max_memory}")'
    spec = "SelfSpec()"
    if way == CACHED:
        spec = f'SelfSpec.from_pretrained("{asked.cache}", tokenizer=tokenizer)'
    return [f"model = {load}", f"selfspec.attach(model, selfspec.{spec})"]


def about_texts(measured: Comparison, is_wrong: bool) -> str:
    """How many texts are those of plain `generate()`."""
    total, others = len(measured.lengths), ", ".join(sorted(measured.parted))
    same = f"{total - len(measured.parted)} of {total} are plain generate()'s, token for token"
    if not measured.parted:
        return f"Same text: {same}."
    if is_wrong:
        return (
            f"NOT the same text: {same} (not {others}). In float32 that is right only where two "
            "tokens are as likely as rounding can tell; please report it."
        )
    return (
        f"In {measured.dtype} a wider forward rounds differently, so texts may part where two "
        f"tokens are almost equally likely: {same} (not {others})."
    )


def _table(measured: Comparison, *, with_times: bool) -> Table:
    """A row for each prompt, and one for all of them."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_footer=True)
    columns: list[list[str]] = []

    def add(title: str, cells: list[str], total: str) -> None:
        table.add_column(title, total, justify="right" if columns else "left")
        columns.append(cells)

    add("prompt", list(measured.lengths), "all")
    lengths = list(measured.lengths.values())
    add("tokens", [str(each) for each in lengths], str(sum(lengths)))
    for name, way in measured.ways.items():
        if with_times:
            seconds = [sum(each) / len(each) for each in zip(*way.seconds, strict=True)]
            cells = [f"{each:.2f}" for each in (*seconds, sum(seconds))]
            if name != STOCK:
                speed_ups = (*measured.speed_ups(name, 0), measured.speed_up(name))
                cells = [f"{c} ({s:.2f}x)" for c, s in zip(cells, speed_ups, strict=True)]
            add(f"{name},\nseconds" + "\n(speed-up)" * (name != STOCK), cells[:-1], cells[-1])
        if name != STOCK:
            rates = [way.total(prompt).tokens_per_step for prompt in range(len(lengths))]
            total = f"{way.total().tokens_per_step:.2f}"
            whose = "" if with_times else f"{name},\n"
            add(f"{whose}tokens\na step", [f"{each:.2f}" for each in rates], total)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table
