"""`selfspec check`: what drafts bring with one model on this machine, in about a minute."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.shared.messages import Verbose, working
from selfspec.cli.shared.opened import loaded
from selfspec.cli.shared.options import (
    CacheFolder,
    DeviceName,
    WriteOptions,
    unfolds,
)
from selfspec.cli.shared.text_files import check_output
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.cli.check.check_measuring import Measured
    from selfspec.cli.check.check_prompts import Question
    from selfspec.cli.shared.writer import Writer

_SHARE = 0.8  # of the free memory, which weights may take
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@unfolds
def check(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder or Hub id of a causal language model. Default: the small one that comes "
            "with selfspec.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Your own prompts, one a line in JSON: as 'selfspec batch' reads them, or "
            '{"turns": ["...", ...]}. Default: five of different kinds.',
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16 or float16. auto: bfloat16 and float32, one after the other, "
            "if the memory is large enough."
        ),
    ] = "auto",
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the likeliest token. Higher: more varied.")
    ] = 0.0,
    seconds: Annotated[
        int,
        typer.Option(
            min=1, help="How long to measure. More: longer answers, more reliable figures."
        ),
    ] = 60,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all figures to this JSON file too."),
    ] = None,
    device: DeviceName = "auto",
    cache: CacheFolder = None,
    verbose: Verbose = False,
) -> None:
    """Measure how much faster a model is with drafts on this machine, and say what to use."""
    from selfspec.cli.check.check_prompts import questions_of
    from selfspec.cli.shared.model_loading import check_options

    asked = WriteOptions(
        model=model, device=device, dtype=dtype, temperature=temperature, seed=0, cache=cache
    )
    check_options(asked, "MODEL")
    check_output(output)
    questions = questions_of(prompts)
    dtypes, left_out = _precisions(asked)
    found = []
    for each in dtypes:
        with loaded(replace(asked, dtype=each), 1) as writer:
            found.append(_measured(writer, questions, seconds / len(dtypes)))
        del writer
        gc.collect()  # Its model is gone before the next one comes.
    from selfspec.cli.check.check_report import print_report, write_json

    name = model or "your/model"
    print_report(name, found, left_out)
    if output is not None:
        write_json(output, name, found, left_out)


def _measured(writer: Writer, questions: list[Question], seconds: float) -> Measured:
    from selfspec import detach
    from selfspec.cli.check.check_measuring import measure_model

    with working("Measuring") as say:
        found = measure_model(writer, questions, seconds=seconds, say=say)
    detach(writer.model)
    return found


def _precisions(asked: WriteOptions) -> tuple[list[str], list[str]]:
    """The precisions whose weights fit into memory, and what is said about the others."""
    if asked.dtype != "auto":
        return [asked.dtype], []
    with working("Looking at the model and the memory"):
        number, free = _num_parameters_and_free_memory(asked)
    sizes = {dtype: number * _BYTES[dtype] for dtype in ("bfloat16", "float32")}
    fits = [dtype for dtype, size in sizes.items() if size <= _SHARE * free]
    if not fits:
        raise CliError(
            f"MODEL must fit into memory: it takes {sizes['bfloat16'] / 1e9:.1f} GB in bfloat16 "
            f"(got {free / 1e9:.1f} GB free); 'selfspec generate --max-memory' reads layers from "
            "disk"
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
