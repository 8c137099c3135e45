"""`selfspec demo`: watch drafts being accepted, with timings against stock."""

from __future__ import annotations

from typing import Annotated

import typer

from selfspec.cli.demo.snippets import named, sampling_of
from selfspec.cli.shared.messages import Verbose
from selfspec.cli.shared.opened import checked, loaded
from selfspec.cli.shared.options import (
    CacheFolder,
    Knobs,
    MaxNewTokens,
    RunOptions,
    Sampling,
    WriteOptions,
    unfolds,
)


@unfolds
def demo(
    loading: RunOptions,
    sampling: Sampling,
    knobs: Knobs,
    cache: CacheFolder = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to continue; can be given several times. Default: three pieces of "
            "Python code."
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 48,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, metavar="NUMBER", help="Timed rounds. More: steadier times, and a longer wait."
        ),
    ] = 3,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw the draft tree with the longest right guess.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Watch drafts being accepted, then see the same texts timed against plain generate().

    The embedded model samples at temperature 0.5 with seed 1 by default.
    """
    chosen = sampling_of(loading, sampling)
    asked = WriteOptions(**vars(loading), **vars(chosen), cache=cache)
    config = checked(asked, knobs)
    with loaded(asked, max_new_tokens) as writer:
        from selfspec.cli.demo.showing import Demo

        same = Demo(writer, config, named(prompt or []), rounds).run(with_tree=tree)
    raise typer.Exit(0 if same else 1)
