"""What `selfspec check` and `selfspec demo` print: a table, a verdict, and Python to copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.cli.comparison import Comparison
from selfspec.config import ROUNDED

if TYPE_CHECKING:
    from selfspec.cli.options import WriteOptions

_GAIN = 1.03  # A smaller speed-up is no gain.
_ENOUGH = 96  # tokens of one answer to each prompt


def print_report(
    console: Console, measured: Comparison, options: WriteOptions, *, sees: bool = False
) -> int:
    is_wrong = measured.dtype == "float32" and bool(measured.parted)
    is_check = options.model is not None  # The demo shows its drafts, whatever they bring.
    console.print(table_of(measured))
    if measured.total.num_drafts:
        console.print(f"{measured.total.acceptance}.")
    if reason := measured.total.draft_model_reason:
        console.print(Text(f"The draft model drafted little or nothing: {reason}."), soft_wrap=True)
    console.print(Text(about_texts(measured, is_wrong), "bold red" if is_wrong else ""))
    console.print(Text(f"\n{verdict(measured)}\n", "bold"), soft_wrap=True)
    if is_check and has_times(measured) and measured.interval[0] >= _GAIN:
        for line in python_lines(options, measured, sees=sees):
            console.print(f"    {line}", markup=False, soft_wrap=True)
    return 1 if is_wrong or not measured.num_drafted else 0


def has_times(measured: Comparison) -> bool:
    """Whether times say anything: something was drafted, in texts of some length."""
    return bool(measured.num_drafted) and sum(measured.lengths.values()) >= _ENOUGH


def verdict(measured: Comparison) -> str:
    num_tokens, total = sum(measured.lengths.values()), measured.total
    if not measured.num_drafted:
        why = total.disabled_reason or total.paused or "no step was worth a draft"
        return f"Nothing was drafted: {why}."
    if num_tokens < _ENOUGH:
        return (
            f"Too few tokens for times: the answers have {num_tokens} in all, and {_ENOUGH} are "
            "needed; give prompts with longer answers."
        )
    low, high = measured.interval
    basis = (
        f"{low:.2f}x to {high:.2f}x in {len(measured.plain)} rounds of {num_tokens} tokens, in "
        f"{measured.dtype}"
    )
    if low < _GAIN <= high:
        return f"Not sure: {basis}. A larger --seconds measures more rounds."
    if high < _GAIN:
        return (
            f"No gain here ({basis}): a step brought {total.tokens_per_step:.2f} tokens. Use "
            "generate() as it is."
        )
    text, alone = f"{measured.speed_up:.2f}x faster with selfspec ({basis}).", total.speed_up
    if measured.packs and alone is not None and alone < measured.speed_up:
        text += f" Drafts alone bring {alone:.2f}x; the rest comes from packed weights."
    return text


def python_lines(options: WriteOptions, measured: Comparison, *, sees: bool = False) -> list[str]:
    task = "ImageTextToText" if sees else "CausalLM"
    load = f'AutoModelFor{task}.from_pretrained("{options.model}", dtype="{measured.dtype}")'
    if options.max_memory is not None:
        load = f'selfspec.load("{options.model}", max_memory="{options.max_memory}")'
    if options.weights is not None:
        more = ", sees=True" if sees else ""
        load = f'selfspec.load("{options.model}", weights="{options.weights}"{more})'
    # A draft model that drafted nothing takes memory alone.
    name, drafts = None if measured.total.draft_model_reason else options.draft_model, ""
    lines = [f"model = {load}"]
    if name is not None:
        drafts = f'draft_model="{name}"' if name in ROUNDED else "draft_model=small"
    if name is not None and name not in ROUNDED:
        lines.append(f'small = AutoModelForCausalLM.from_pretrained("{name}")')
    spec = f"SelfSpec({drafts})"
    if options.cache is not None:
        more = f", {drafts}" if drafts else ""
        spec = f'SelfSpec.from_pretrained("{options.cache}", tokenizer=tokenizer{more})'
    packs = ", pack=True" if measured.packs else ""
    return [*lines, f"selfspec.attach(model, selfspec.{spec}{packs})"]


def about_texts(measured: Comparison, is_wrong: bool) -> str:
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
        f"tokens are almost equally likely: {same} (not {others}). --dtype float32 keeps them."
    )


def table_of(measured: Comparison) -> Table:
    """A row for each prompt, and one for all. Times are left out where they would mislead."""
    lengths, stats = measured.lengths.values(), (*measured.stats.values(), measured.total)
    columns = {
        "prompt": [*measured.lengths, "all"],
        "tokens": [str(length) for length in (*lengths, sum(lengths))],
    }
    if has_times(measured):
        plain, drafted = np.array([*lengths, sum(lengths)]) / measured.seconds
        columns["plain,\ntokens/s"] = [f"{rate:.1f}" for rate in plain]
        columns["selfspec,\ntokens/s"] = [f"{rate:.1f}" for rate in drafted]
        columns["speed-up"] = [f"{speed_up:.2f}x" for speed_up in drafted / plain]
    columns["tokens\na step"] = [f"{prompt.tokens_per_step:.2f}" for prompt in stats]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), show_footer=True)
    for title, cells in columns.items():
        table.add_column(title, cells[-1], justify="left" if title == "prompt" else "right")
    for index in range(len(lengths)):
        table.add_row(*(cells[index] for cells in columns.values()))
    return table
