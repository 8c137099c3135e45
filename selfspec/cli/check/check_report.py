"""What `selfspec check` says: tables, a picture, a verdict, and two lines of Python to copy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from selfspec.cli.check.check_measuring import Answered, Measured
from selfspec.cli.shared.text_files import write_text
from selfspec.cost import CostCurve

_GAIN = 1.03  # Less than that is no gain: times vary by more.
_DEAR = 1.5  # plain steps for a step of four nodes
_FEW = 1.15  # tokens a step
_LONG = 0.5  # of the time, for reading prompts
_BUSY = 0.2  # Plain runs of one prompt that differ by more than this are reported.
_LONGEST = 50  # The longest bar of a picture, in characters.


def print_report(name: str, found: Sequence[Measured], left_out: Sequence[str]) -> None:
    """Prints everything, the verdict and the lines to copy last."""
    console = Console(highlight=False)
    best = _best(found)
    console.print(_rates(found))
    console.print(_kinds(found))
    if best.curve is not None:
        console.print(f"Cost of a step in plain steps, by its width in tokens ({best.dtype}):")
        for line in bars(best.curve):
            console.print(line, markup=False, soft_wrap=True)
        console.print()
    for line in left_out:
        console.print(line, markup=False)
    console.print(f"\n{verdict(found)}\n", style="bold", markup=False)
    for line in python_lines(name, found):
        console.print(f"    {line}", markup=False, soft_wrap=True)
    for line in _remarks(best):
        console.print(line, markup=False)


def bars(curve: CostCurve) -> list[str]:
    """A bar for each width of a step, as long as that step is dear."""
    costs = {width: curve.relative(width) for width in curve.widths}
    scale = _LONGEST / max(costs.values())
    return [f"{width:4} {cost:6.2f} {'█' * round(scale * cost)}" for width, cost in costs.items()]


def verdict(found: Sequence[Measured]) -> str:
    """One or two sentences: is it faster, in which precision, and if not, why not?"""
    best = _best(found)
    speed_ups = [each.speed_up for each in best.prompts]
    if _gains(best):
        return (
            f"{best.speed_up:.2f}x faster with selfspec, in {best.dtype} (single prompts: "
            f"{min(speed_ups):.2f}x to {max(speed_ups):.2f}x)."
        )
    most = max(speed_ups)
    but = f" Single prompts gain up to {most:.2f}x." if most >= 1.1 else ""
    return f"No gain here ({best.speed_up:.2f}x in {best.dtype}), because {_because(best)}.{but}"


def python_lines(name: str, found: Sequence[Measured]) -> list[str]:
    """How to load the model as it was fastest, and how to draft, if that pays."""
    best = _best(found)
    threads = min(best.threads, key=lambda number: best.threads[number])
    load = f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="{best.dtype}")'
    if len(best.threads) > 1:
        load = f"torch.set_num_threads({threads}); {load}"
    if not _gains(best):
        return [load, "# and generate() as it is: drafts gain nothing here"]
    return [load, "selfspec.attach(model, selfspec.SelfSpec())"]


def write_json(path: Path, name: str, found: Sequence[Measured], left_out: Sequence[str]) -> None:
    """Writes all figures."""
    values = {
        "model": name,
        "verdict": verdict(found),
        "python": python_lines(name, found),
        "left_out": list(left_out),
        "precisions": [_as_json(each) for each in found],
    }
    write_text(path, "--output", json.dumps(values, indent=1) + "\n")


def _best(found: Sequence[Measured]) -> Measured:
    """The precision in which the answers came soonest."""
    return min(found, key=lambda each: each.seconds_a_token)


def _gains(best: Measured) -> bool:
    """Is it faster? A model that is decoded plainly is not, whatever chance says."""
    is_plain = best.stats.disabled_reason is not None and not best.stats.drafted_by_source
    return best.speed_up >= _GAIN and not is_plain


def _because(best: Measured) -> str:
    """Why there is no gain."""
    if best.stats.disabled_reason:
        return f"the model is not drafted for: {best.stats.disabled_reason}"
    per_step = best.stats.tokens_per_step
    if best.curve is not None and best.curve.relative(4) > _DEAR:
        return (
            f"wide steps cost too much: one of four tokens takes {best.curve.relative(4):.1f} "
            f"plain steps, and the steps that were taken brought {per_step:.2f} tokens on average"
        )
    if per_step < _FEW:
        return f"these answers are hard to guess: a step brought {per_step:.2f} tokens"
    reading = sum(each.plain.prompt_seconds for each in best.prompts)
    if reading > _LONG * best.plain_seconds:
        return "most of the time goes into reading the prompts, which drafts don't shorten"
    return "drafts cost about as much as they save"


def _rates(found: Sequence[Measured]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("tokens a second")
    for title in ("prompt", "answer", "tokens a step", "speed-up", "by drafts alone"):
        table.add_column(title, justify="right")
    for each in found:
        stats = each.stats
        alone = "?" if stats.speed_up is None else f"{stats.speed_up:.2f}x"
        cells = (f"{stats.tokens_per_step:.2f}", f"{each.speed_up:.2f}x", alone)
        plain = _rate_cells([one.plain for one in each.prompts])
        drafted = _rate_cells([one.drafted for one in each.prompts])
        table.add_row(f"{each.dtype}, plain", *plain, "1.00", "", "")
        table.add_row(f"{each.dtype}, selfspec", *drafted, *cells)
    return table


def _rate_cells(answers: Sequence[Answered]) -> tuple[str, str]:
    prompt = sum(each.num_prompt for each in answers) / sum(e.prompt_seconds for e in answers)
    tokens = sum(len(each.new_ids) - 1 for each in answers)
    return f"{prompt:.0f}", f"{tokens / max(sum(e.answer_seconds for e in answers), 1e-9):.1f}"


def _kinds(found: Sequence[Measured]) -> Table:
    """The speed-up of each prompt, and how undecided the model was."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("speed-up of")
    for title in (*(each.dtype for each in found), "bits a token"):
        table.add_column(title, justify="right")
    for prompts in zip(*(each.prompts for each in found), strict=True):
        cells = [f"{each.speed_up:.2f}x" for each in prompts]
        table.add_row(prompts[0].kind, *cells, f"{prompts[0].entropy:.2f}")
    table.caption = (
        "Bits a token: the entropy of the model's own choices. The fewer, the easier to guess."
    )
    table.caption_justify = "left"
    return table


def _remarks(best: Measured) -> list[str]:
    lines = []
    if best.variation > _BUSY:
        lines.append(
            f"The machine was busy: two plain runs of one prompt differ by {best.variation:.0%}, "
            "and no figure here is surer than that. Run it again."
        )
    if best.stats.packed_bytes and best.speed_up > (best.stats.speed_up or 1.0):
        size = best.stats.packed_bytes / 1e6
        lines.append(
            f"What drafts alone don't bring comes from packed weights, which take {size:.0f} MB of "
            "memory more."
        )
    if best.dtype == "float32":
        lines.append("In float32 the text is that of plain generate().")
    else:
        lines.append(
            f"In {best.dtype} texts may part from those of plain generate() where two tokens are "
            "almost equally likely."
        )
    return lines


def _as_json(found: Measured) -> dict[str, Any]:
    return {
        "dtype": found.dtype,
        "speed_up": found.speed_up,
        "variation": found.variation,
        "entropy": found.entropy,
        "tokens_per_step": found.stats.tokens_per_step,
        "speed_up_by_drafts_alone": found.stats.speed_up,
        "forward": found.stats.forward,
        "packed_bytes": found.stats.packed_bytes,
        "threads": found.threads,
        "about": found.about,
        "widths": [] if found.curve is None else list(found.curve.widths),
        "seconds": [] if found.curve is None else [*map(found.curve.seconds, found.curve.widths)],
        "prompts": [
            {
                "kind": each.kind,
                "entropy": each.entropy,
                "speed_up": each.speed_up,
                "plain": _answer_as_json(each.plain),
                "drafted": _answer_as_json(each.drafted),
            }
            for each in found.prompts
        ],
    }


def _answer_as_json(answer: Answered) -> dict[str, Any]:
    return {
        "num_prompt_tokens": answer.num_prompt,
        "num_new_tokens": len(answer.new_ids),
        "prompt_seconds": answer.prompt_seconds,
        "answer_seconds": answer.answer_seconds,
    }
