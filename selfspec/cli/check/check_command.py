"""`selfspec check` and `selfspec demo`: what drafts bring with one model on this machine."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt
from rich.console import Console
from rich.text import Text

from selfspec.cli.check.facts import facts
from selfspec.cli.check.questions import SNIPPETS, Question, questions_of
from selfspec.cli.check.report import (
    fastest,
    origins_table,
    print_figures,
    print_texts,
    python_lines,
    verdict,
    write_json,
)
from selfspec.cli.check.stopwatch import CACHED, DRAFTED, MIN_ROUNDS, measure, warm_up
from selfspec.cli.shared.live_text import LiveText
from selfspec.cli.shared.messages import working
from selfspec.cli.shared.options import Knobs, Model, RunOptions, WriteOptions
from selfspec.cli.shared.paint import Painter
from selfspec.cli.shared.text_files import check_output, encoded_prompts
from selfspec.cli.shared.writer import checked, loaded
from selfspec.config import SpecConfig
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.cli.check.report import Verdict
    from selfspec.cli.check.stopwatch import Measured, Say
    from selfspec.cli.shared.writer import Writer
    from selfspec.cost import CostCurve
    from selfspec.plugin import SelfSpec

_SHARE = 0.8  # of the free memory, which weights may take
_BYTES = {"bfloat16": 2, "float32": 4}
_LEAST_TOKENS, _MOST_TOKENS = 48, 128  # of an answer
_CURVE_SHARE = 0.15  # of the time, for what a step costs by its width
_CONTEXT = 512  # tokens before a step whose cost is measured
_ENDLESS = 1 << 30  # positions, where a model's config names no limit


def demo(
    model: Annotated[
        str | None,
        Parameter(help="Folder or Hub id of a model. Default: a small one that continues Python."),
    ] = None,
    /,
    *,
    prompt: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    seconds: PositiveInt = 10,
    asked: WriteOptions = WriteOptions(max_new_tokens=48),
    knobs: Knobs = Knobs(),
) -> int:
    """Watch drafts being accepted, then see the same texts timed against plain generate().

    The embedded model samples at temperature 0.5 with seed 1, unless you ask for something else.

    Args:
        prompt: Text to continue; can be given several times. Default: three pieces of Python.
        seconds: About how long to measure.
    """
    own = [Question(each.strip().split("\n")[0][:20], each) for each in prompt]
    asked = replace(asked, model=model)
    if model is None and asked.temperature is None and asked.seed is None:
        asked = replace(asked, temperature=0.5, seed=1)
    config, console = checked(asked, knobs.config()), Console(highlight=False)
    with loaded(asked) as writer:
        questions = _fitting(writer, own or SNIPPETS, asked.max_new_tokens)
        spec, _ = _begun(console, writer, config, questions)
        _show(console, writer, config, questions)
        with working("Timing") as say:
            measured = _measured(writer, questions, config, seconds, asked.max_new_tokens, say)
        console.print(origins_table(measured, writer.origins(config)))
        del spec  # Until here it has kept what is prepared of the model.
    status, _ = _concluded(console, [measured])
    console.print(
        "This tiny model only shows the way: measure yours with 'selfspec check your/model'."
        if model is None
        else "Other texts gain more or less: 'selfspec check' measures several kinds."
    )
    return status


def check(
    model: Model,
    /,
    *,
    prompts: Path | None = None,
    temperature: NonNegativeFloat = 0.0,
    seconds: PositiveInt = 60,
    output: Path | None = None,
    asked: RunOptions = RunOptions(),
) -> int:
    """Measure how much faster a model is with drafts on this machine, and say what to use.

    Without --dtype it measures bfloat16 and float32, if the memory is large enough.

    Args:
        prompts: Your own prompts, one a line in JSON, as 'selfspec batch' reads them. Default: five
            of different kinds.
        temperature: 0: always the likeliest token. Higher: more varied text.
        seconds: About how long to measure. A slow model takes longer, for enough tokens.
        output: Write all figures to this new JSON file too.
    """
    wanted = {**vars(asked), "model": model, "temperature": temperature, "seed": 0}
    writing = WriteOptions(**wanted, max_new_tokens=_LEAST_TOKENS)
    checked(writing, SpecConfig())
    check_output(output)
    kinds, console = questions_of(prompts), Console(highlight=False)
    dtypes, left_out = _precisions(writing)
    found: list[Measured] = []
    about: dict[str, str] = {}
    for dtype in dtypes:
        with loaded(replace(writing, dtype=dtype)) as writer:
            measured, about = _checked(console, writer, kinds, seconds / len(dtypes), about)
            found.append(measured)
        del writer
        gc.collect()  # Its model is gone before the next one comes.
    for line in left_out:
        console.print(line, markup=False)
    status, said = _concluded(console, found)
    lines = python_lines(model, fastest(found), said, asked.cache, asked.max_memory)
    for line in lines:
        console.print(f"    {line}", markup=False, soft_wrap=True)
    if output is not None:
        known = {"verdict": said.text, "python": lines, "left_out": left_out, "about": about}
        write_json(output, model, known, found)
    return status


def _checked(
    console: Console,
    writer: Writer,
    kinds: Sequence[Question],
    seconds: float,
    known: dict[str, str],
) -> tuple[Measured, dict[str, str]]:
    """All that `check` measures in one precision, and the facts; what is known is not said."""
    config, questions = SpecConfig(), _fitting(writer, kinds, _LEAST_TOKENS)
    spec, about = _begun(console, writer, config, questions, known)
    with working(f"Measuring in {writer.dtype}") as say:
        say(f"{writer.dtype}: what a step costs by its width")
        curve = _curve(writer, spec, _CURVE_SHARE * seconds)
        measured = _measured(writer, questions, config, seconds, None, say)
    measured.curve = curve
    return measured, about


def _begun(
    console: Console,
    writer: Writer,
    config: SpecConfig,
    questions: Sequence[tuple[Question, list[int]]],
    known: dict[str, str] | None = None,
) -> tuple[SelfSpec, dict[str, str]]:
    """Warms the model up, which shows whether drafts are on, and says what was not known yet.

    What is prepared of a model, such as packed weights, lives as long as the `SelfSpec`.
    """
    with working("Warming up"):
        spec = writer.new_spec(config)
        warm_up(writer, spec, questions[0][1])
        about = facts(writer, spec)
    for name, value in about.items():
        if value != (known or {}).get(name):
            console.print(Text(f"{name}: {value}", "dim"), soft_wrap=True)
    return spec, about


def _measured(
    writer: Writer,
    questions: Sequence[tuple[Question, list[int]]],
    config: SpecConfig,
    seconds: float,
    num_new: int | None,
    say: Say,
) -> Measured:
    """Each prompt answered plainly, with drafts, and with a cache if there is one, in turns."""
    bare = writer.start._replace(cache=None)
    ways = {DRAFTED: lambda: bare.new_spec(config, writer.tokenizer)}
    if writer.start.cache is not None:
        ways[CACHED] = lambda: writer.new_spec(config)
    if num_new is None:  # As many tokens as there is time for
        step = warm_up(writer, ways[DRAFTED](), questions[0][1])
        num_answers = MIN_ROUNDS * (1 + len(ways)) * len(questions)
        num_new = min(max(int(seconds / step / num_answers), _LEAST_TOKENS), _MOST_TOKENS)
    return measure(writer, questions, ways, num_new=num_new, seconds=seconds, say=say)


def _curve(writer: Writer, spec: SelfSpec, max_seconds: float) -> CostCurve | None:
    """What a step costs by its width behind a text, for a model that is whole in memory."""
    from selfspec.run.profile import profile

    if spec.ability(writer.model).attention is None or spec.stats.forward == "streamed":
        return None
    context = min(_CONTEXT, (writer.loaded.max_positions or _ENDLESS) // 2)
    _, curve = profile(
        writer.model, spec.config, num_columns=context, num_rows=1, max_seconds=max_seconds
    )
    return curve


def _show(
    console: Console,
    writer: Writer,
    config: SpecConfig,
    questions: Sequence[tuple[Question, list[int]]],
) -> None:
    """Streams each text in the colours of its drafts. One `SelfSpec` learns from all of them."""
    painter, spec = Painter(console), writer.new_spec(config)
    if painter.in_colour:
        console.print(painter.legend(writer.origins(config)))
    for question, ids in questions:
        console.rule(Text(question.kind), align="left", style="dim")
        painter.write(str(question.prompt), "dim")
        writer.reseed()
        live = LiveText(writer.tokenizer, ids, painter.show)
        writer.write(ids, spec, streamer=live)
        painter.show("" if live.text.endswith("\n") else "\n")
    console.rule(style="dim")


def _concluded(console: Console, found: Sequence[Measured]) -> tuple[int, Verdict]:
    """Prints figures, texts and the verdict; returns the exit status with the verdict."""
    said = verdict(found)
    print_figures(console, found, said)
    same = print_texts(console, found)
    console.print(Text(f"\n{said.text}\n", "bold"), soft_wrap=True)
    drafted = any(each.num_drafted for each in found)
    return (0 if same and drafted else 1), said


def _fitting(
    writer: Writer, questions: Sequence[Question], num_new: int
) -> list[tuple[Question, list[int]]]:
    """The questions with their ids. Those that leave no room for an answer are left out."""
    limit = writer.loaded.max_positions or _ENDLESS
    ids = encoded_prompts([each.prompt for each in questions], writer.tokenizer)
    pairs = zip(questions, ids, strict=True)
    found = [(each, prompt) for each, prompt in pairs if 0 < len(prompt) <= limit - num_new]
    if not found:
        raise CliError(
            f"a prompt must leave room for {num_new} tokens in the model's {limit} positions (got "
            f"{min(map(len, ids))} tokens in the shortest one); give another"
        )
    return found


def _precisions(asked: WriteOptions) -> tuple[list[str], list[str]]:
    """The precisions whose weights fit into memory, and what is said about the others."""
    if asked.dtype != "auto" or asked.max_memory is not None:
        return [asked.dtype], []
    with working("Looking at the model and the memory"):
        number, free = _num_parameters_and_free_memory(asked)
    sizes = {dtype: number * num_bytes for dtype, num_bytes in _BYTES.items()}
    fits = [dtype for dtype, size in sizes.items() if size <= _SHARE * free]
    if not fits:
        raise CliError(
            f"MODEL must fit into memory: it takes {sizes['bfloat16'] / 1e9:.1f} GB in bfloat16 "
            f"(got {free / 1e9:.1f} GB free); --max-memory reads layers from disk"
        )
    left_out = [
        f"{dtype} is left out: it takes {size / 1e9:.1f} GB of {free / 1e9:.1f} GB free."
        for dtype, size in sizes.items()
        if dtype not in fits
    ]
    return fits, left_out


def _num_parameters_and_free_memory(asked: WriteOptions) -> tuple[int, int]:
    from selfspec.cli.shared.model_loading import device_of, load_shape
    from selfspec.machine.memory import free_memory

    return int(load_shape(asked).num_parameters()), free_memory(device_of(asked.device))
