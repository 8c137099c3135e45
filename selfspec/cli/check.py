"""`selfspec check` and `selfspec demo`: what drafts bring with one model on this machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from selfspec.cli.comparison import (
    MIN_ROUNDS,
    Prompts,
    Question,
    measure,
    packed,
    questions_of,
    snippets,
    timed,
)
from selfspec.cli.loading import check_options
from selfspec.cli.messages import paint, working
from selfspec.cli.options import (
    Model,
    ModelOptions,
    Positive,
    RunOptions,
    Temperature,
    WriteOptions,
)
from selfspec.cli.report import print_report
from selfspec.cli.writer import Writer, load_writer
from selfspec.config import SpecConfig
from selfspec.errors import CliError
from selfspec.serving.translator import num_tokens

if TYPE_CHECKING:
    from selfspec.plugin import SelfSpec
    from selfspec.records import StepRecord

_LEAST_TOKENS, _MOST_TOKENS = 48, 128  # of an answer
_ENDLESS = 1 << 30  # The positions of a model whose config names no limit.


def demo(*, seconds: Positive = 10, options: ModelOptions = ModelOptions()) -> int:
    """Watch drafts being accepted, then see the same texts timed against plain generate().

    A small model that comes with selfspec continues three pieces of Python, at temperature 0.5.

    Args:
        seconds: About how long to measure.
    """
    writing = WriteOptions(**vars(options), temperature=0.5, seed=1, max_new_tokens=_LEAST_TOKENS)
    status = _compared(writing, snippets(), seconds, _LEAST_TOKENS)
    print("This tiny model only shows the way: measure yours with 'selfspec check your/model'.")
    return status


def check(
    model: Model,
    /,
    *,
    prompts: Path | None = None,
    temperature: Temperature = 0.0,
    seconds: Positive = 60,
    options: RunOptions = RunOptions(),
) -> int:
    """Measure how much faster a model is with drafts on this machine, and say what to use.

    Args:
        prompts: Your own prompts, one a line in JSON, as 'selfspec batch' reads them. Default: five
            of different kinds.
        temperature: 0: always the likeliest token. Higher: more varied text.
        seconds: About how long to measure. A slow model takes longer, for enough tokens.
    """
    common = {**vars(options), "model": model, "temperature": temperature, "seed": 0}
    writing = WriteOptions(**common, max_new_tokens=_LEAST_TOKENS)
    return _compared(writing, questions_of(prompts), seconds, _MOST_TOKENS)


def _compared(
    options: WriteOptions, questions: Sequence[Question], seconds: float, most_tokens: int
) -> int:
    check_options(options)
    config, console = SpecConfig(), Console(highlight=False)
    sees = any(question.has_images for question in questions)
    writer = load_writer(options, sees=sees)
    prompts = _that_fit(writer, questions)
    with working("Warming up"):
        spec = writer.new_spec(config)
        for assistant in (spec, None):
            packed(writer, is_wanted=assistant is not None)
            new_ids, took = timed(writer, assistant, prompts[0][1], _LEAST_TOKENS)
    for line in _facts(writer, spec):
        console.print(Text(line, "dim"), soft_wrap=True)
    if options.model is None:
        _show(console, writer, prompts)
    with working("Measuring") as say:
        fits = seconds / took * len(new_ids) / (MIN_ROUNDS * 2 * len(prompts))
        num_new = int(min(max(fits, _LEAST_TOKENS), most_tokens))
        new_spec = partial(writer.new_spec, config)
        measured = measure(writer, prompts, new_spec, num_new=num_new, seconds=seconds, say=say)
    status = print_report(console, measured, options, sees=sees)
    if options.weights == "int4" and (note := _note_on_four_bits()):
        console.print(note, soft_wrap=True)
    return status


def _note_on_four_bits() -> str | None:
    """That 8 bits are faster on this CPU, as they may be with AVX2 alone; None if they aren't."""
    from selfspec.weights.rounded import seconds_a_token

    slower = seconds_a_token(4) / seconds_a_token(8)
    if slower < 1.1:
        return None
    return (
        f"A product in 4 bits takes {slower:.1f} times as long as in 8 on this CPU: compare with "
        "--weights int8."
    )


def _that_fit(writer: Writer, questions: Sequence[Question]) -> Prompts:
    """The questions with their ids, without those that leave no room for an answer."""
    limit = writer.max_positions or _ENDLESS
    prompts = [(question, question.encoded(writer)) for question in questions]
    most = limit - _LEAST_TOKENS
    fitting = [(question, ids) for question, ids in prompts if 0 < num_tokens(ids) <= most]
    if not fitting:
        shortest = min(num_tokens(ids) for _, ids in prompts)
        raise CliError(
            f"a prompt must leave room for {_LEAST_TOKENS} tokens in the model's {limit} positions "
            f"(got {shortest} tokens in the shortest one); give another"
        )
    return fitting


def _facts(writer: Writer, spec: SelfSpec) -> list[str]:
    import torch

    from selfspec import __version__
    from selfspec.machine.device import calculates_in, device_name

    device, mode = writer.model.device, spec.support(writer.model).mode
    is_off, why = mode == "plain", spec.stats.disabled_reason
    half = "no" if device.type == "cpu" and not calculates_in(torch.bfloat16) else "yes"
    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    return [
        f"selfspec {__version__}, {versions}, Python {platform.python_version()}",
        f"machine: {device_name(device)}, threads: {torch.get_num_threads()}, bfloat16: {half}",
        f"model: {writer}, {writer.sampling}",
        f"drafts: {'off' if is_off else f'as {mode}s'}{f': {why}' if why else ''}",
    ]


def _show(console: Console, writer: Writer, prompts: Prompts) -> None:
    """Writes the texts, with drafted tokens in colour. One `SelfSpec` learns from all."""
    from selfspec.batch.text_stream import TextStream

    spec = writer.new_spec(SpecConfig())
    if console.color_system is not None and not console.no_color:
        console.print(Text("Green: drafted, and right. Plain: the model's own.", "dim"))
    for question, ids in prompts:
        assert isinstance(ids, list)  # The demo has no images.
        console.rule(Text(question.name), align="left", style="dim")
        paint(console, str(question.prompt), "dim")
        writer.reseed()
        records: list[StepRecord] = []
        with spec.listening(records.append):
            writer.new_ids(ids, spec)
        stream = TextStream(writer.tokenizer, ids)
        for record in records:
            paint(console, stream.add(*record.committed_ids[: record.num_accepted]), "green")
            paint(console, stream.add(*record.committed_ids[record.num_accepted :]))
        paint(console, f"{stream.rest()}\n")
    console.rule(style="dim")
