"""`selfspec check` and `selfspec demo`: what drafts bring with one model on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt
from rich.console import Console
from rich.text import Text

from selfspec.cli.check.facts import facts
from selfspec.cli.check.questions import SNIPPETS, Question, questions_of
from selfspec.cli.check.report import print_report
from selfspec.cli.check.stopwatch import CACHED, DRAFTED, MIN_ROUNDS, measure, warm_up
from selfspec.cli.shared.live_text import LiveText
from selfspec.cli.shared.messages import working
from selfspec.cli.shared.options import Knobs, Model, RunOptions, WriteOptions
from selfspec.cli.shared.paint import Painter
from selfspec.cli.shared.writer import checked, loaded
from selfspec.config import SpecConfig
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.cli.check.stopwatch import Asked
    from selfspec.cli.shared.writer import Writer
    from selfspec.cost import CostCurve
    from selfspec.plugin import SelfSpec

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
    asked = replace(asked, model=model)
    if model is None and asked.temperature is None and asked.seed is None:
        asked = replace(asked, temperature=0.5, seed=1)
    config, console = checked(asked, knobs.config()), Console(highlight=False)
    questions = [Question(each.strip().split("\n")[0][:20], each) for each in prompt] or SNIPPETS
    with loaded(asked) as writer:
        found = _fitting(writer, questions, asked.max_new_tokens)
        spec = _warmed(console, writer, config, found)
        _show(console, writer, config, found)
        with working("Timing") as say:
            ways = _ways(writer, config)
            length = asked.max_new_tokens
            measured = measure(writer, found, ways, num_new=length, seconds=seconds, say=say)
        status = print_report(console, measured, writer, spec.config)
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
    asked: RunOptions = RunOptions(),
) -> int:
    """Measure how much faster a model is with drafts on this machine, and say what to use.

    Args:
        prompts: Your own prompts, one a line in JSON, as 'selfspec batch' reads them. Default: five
            of different kinds.
        temperature: 0: always the likeliest token. Higher: more varied text.
        seconds: About how long to measure. A slow model takes longer, for enough tokens.
    """
    wanted = {**vars(asked), "model": model, "temperature": temperature, "seed": 0}
    writing = WriteOptions(**wanted, max_new_tokens=_LEAST_TOKENS)
    config, console = checked(writing, SpecConfig()), Console(highlight=False)
    questions = questions_of(prompts)
    with loaded(writing) as writer:
        found = _fitting(writer, questions, _LEAST_TOKENS)
        spec = _warmed(console, writer, config, found)
        with working("Measuring") as say:
            say("Measuring what a step costs by its width")
            curve, ways = _curve(writer, spec, _CURVE_SHARE * seconds), _ways(writer, config)
            step = warm_up(writer, spec, found[0][1])
            fits = int(seconds / step / (MIN_ROUNDS * (1 + len(ways)) * len(found)))
            length = min(max(fits, _LEAST_TOKENS), _MOST_TOKENS)
            measured = measure(writer, found, ways, num_new=length, seconds=seconds, say=say)
        return print_report(console, measured, writer, spec.config, curve)


def _fitting(writer: Writer, questions: Sequence[Question], num_new: int) -> Asked:
    """The questions with their ids. Those that leave no room for an answer are left out."""
    limit = writer.loaded.max_positions or _ENDLESS
    ids = [each.ids(writer.tokenizer) for each in questions]
    pairs = zip(questions, ids, strict=True)
    found = [(each, prompt) for each, prompt in pairs if 0 < len(prompt) <= limit - num_new]
    if not found:
        raise CliError(
            f"a prompt must leave room for {num_new} tokens in the model's {limit} positions (got "
            f"{min(map(len, ids))} tokens in the shortest one); give another"
        )
    return found


def _warmed(console: Console, writer: Writer, config: SpecConfig, asked: Asked) -> SelfSpec:
    """Warms the model up, which shows whether drafts are on, and says what there is.

    What is prepared of a model, such as packed weights, lives as long as the `SelfSpec`.
    """
    with working("Warming up"):
        spec = writer.new_spec(config)
        warm_up(writer, spec, asked[0][1])
        about = facts(writer, spec)
    for name, value in about.items():
        console.print(Text(f"{name}: {value}", "dim"), soft_wrap=True)
    return spec


def _ways(writer: Writer, config: SpecConfig) -> dict[str, Callable[[], SelfSpec]]:
    """With drafts, and with a cache too if there is one."""
    bare = writer.start._replace(cache=None)
    ways = {DRAFTED: lambda: bare.new_spec(config, writer.tokenizer)}
    return ways if writer.start.cache is None else ways | {CACHED: lambda: writer.new_spec(config)}


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


def _show(console: Console, writer: Writer, config: SpecConfig, asked: Asked) -> None:
    """Streams each text in the colours of its drafts. One `SelfSpec` learns from all of them."""
    painter, spec = Painter(console), writer.new_spec(config)
    if painter.in_colour:
        console.print(painter.legend(writer.origins(config)))
    for question, ids in asked:
        console.rule(Text(question.kind), align="left", style="dim")
        painter.write(str(question.prompt), "dim")
        writer.reseed()
        live = LiveText(writer.tokenizer, ids, painter.show)
        writer.write(ids, spec, streamer=live)
        painter.show("" if live.text.endswith("\n") else "\n")
    console.rule(style="dim")
