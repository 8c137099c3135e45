"""`selfspec cache build`: from texts, or from a model's own answers, to a cache folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Abort, Argument, Option

from selfspec.building.recipe import Recipe
from selfspec.cli.cache.recipe_options import RecipeOptions, recipe_of
from selfspec.cli.fleet.fleet_options import FleetOptions, fleet
from selfspec.cli.shared.log import Verbose
from selfspec.cli.shared.options import ModelOptions, unfolds
from selfspec.cli.shared.waiting import working
from selfspec.errors import CliError
from selfspec.machine.amounts import amount_in_bytes

if TYPE_CHECKING:
    from selfspec.building.builder import Builder
    from selfspec.building.progress import Bars
    from selfspec.building.shards import CallWorkers
    from selfspec.fleet import Work
    from selfspec.store import CacheContents


@unfolds
def build(
    loading: ModelOptions,
    options: RecipeOptions,
    fleet_options: FleetOptions,
    output: Annotated[Path, Argument(help="The cache folder to make.")],
    recipe: Annotated[
        Path | None,
        Option(help="TOML file with the keys below; options replace its keys.", show_default=False),
    ] = None,
    workers: Annotated[
        int, Option(min=1, help="Processes that tokenize. More: faster where templates are slow.")
    ] = 1,
    max_memory: Annotated[
        str,
        Option(help="For counting n-grams; the model is on top. More: fewer runs to merge."),
    ] = "1GB",
    restart: Annotated[
        bool, Option("--restart", help="Begin anew, and drop what an interrupted build left.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace the cache folder that is there.")
    ] = False,
    keep_work: Annotated[
        bool, Option("--keep-work", help="Keep the work folder, with the model's answers in it.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Build a cache from texts, or from the model's own answers to them.

    Run the same command again to go on with a build that was interrupted.
    """
    from selfspec.cli.shared.model_loading import check_options

    asked = recipe_of(recipe, options)
    check_options(loading)
    how = {
        "workers": workers,
        "max_memory": amount_in_bytes(max_memory, name="--max-memory"),
        "restart": restart,
        "overwrite": overwrite,
        "keep_work": keep_work,
    }
    _check_fleet(fleet_options, asked, loading, workers)
    print(_summary(output, _built(asked, loading, fleet_options, how, output)))


def _check_fleet(
    options: FleetOptions, recipe: Recipe, loading: ModelOptions, workers: int
) -> None:
    """Refuses what workers on Ray can't do for a build."""
    options.check(loading.device)
    if options.ray is None:
        return
    if workers > 1:
        raise CliError(
            f"--workers can't be used with --ray, whose workers tokenize (got {workers}); "
            "pass --num-workers instead"
        )
    if recipe.generates:
        raise CliError(
            "--learn-from must be text with --ray (got 'generations', where the model learns from "
            "each answer for the next one); answer the prompts with 'selfspec batch --ray', and "
            "build from its answers"
        )


def _built(
    recipe: Recipe,
    loading: ModelOptions,
    fleet_options: FleetOptions,
    how: dict[str, Any],
    output: Path,
) -> CacheContents:
    """Builds the cache; Ctrl-C leaves what is done by then for the next start."""
    with ExitStack() as stack:
        with working(f"Loading the tokenizer of {loading.model or 'the embedded model'}"):
            tokenizer = _tokenizer(stack, recipe, loading, how, output)
        spread = None
        if fleet_options.ray is not None:
            spread = stack.enter_context(_spread(recipe, loading, fleet_options, how["max_memory"]))
        builder, bars = _prepared(recipe, tokenizer, loading, spread, how)
        stack.enter_context(bars)
        try:
            return builder.run(output)
        except KeyboardInterrupt as error:
            bars.say("interrupted; run the same command again to go on")
            raise Abort from error


def _tokenizer(
    stack: ExitStack, recipe: Recipe, loading: ModelOptions, how: dict[str, Any], output: Path
) -> Any:
    """The tokenizer. Faults that show without a model are told here."""
    from selfspec.building.inputs import find_inputs
    from selfspec.store import check_target

    find_inputs(recipe)
    check_target(output, overwrite=how["overwrite"])
    from selfspec.cli.shared.model_loading import load_tokenizer, quiet

    stack.enter_context(quiet())
    return load_tokenizer(loading)


def _prepared(
    recipe: Recipe,
    tokenizer: Any,
    loading: ModelOptions,
    spread: CallWorkers | None,
    how: dict[str, Any],
) -> tuple[Builder, Bars]:
    """What builds, and its bars."""
    from selfspec.building.builder import Builder, BuildOptions
    from selfspec.building.progress import Bars
    from selfspec.cli.shared.model_loading import load_model, load_shape

    bars = Bars(Console(stderr=True))

    def load() -> Any:
        if spread is not None:
            return load_shape(loading)
        bars.say(f"Loading {loading.model or 'the embedded model'} ...")
        return load_model(loading, tokenizer).model

    builder = Builder(
        recipe,
        tokenizer,
        load,
        bars,
        BuildOptions(**how),
        model_name=loading.model,
        call_workers=spread,
    )
    return builder, bars


@contextmanager
def _spread(
    recipe: Recipe, loading: ModelOptions, options: FleetOptions, max_memory: int
) -> Iterator[CallWorkers]:
    """Workers that read and count for a build. GPUs are asked for if a model reads."""
    device = loading.device if recipe.wants_lut else "cpu"
    with fleet(options, device, partial(_hands, recipe, loading, max_memory)) as workers:

        def spread(task: str, jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
            for (_, job), result in workers.in_order((task, job) for job in jobs):
                yield job, result

        yield spread


@contextmanager
def _hands(recipe: Recipe, loading: ModelOptions, max_memory: int) -> Iterator[Work]:
    """In a worker: what does its part of a build."""
    from selfspec.building.build_worker import BuildWorker
    from selfspec.cli.shared.model_loading import load_model, load_tokenizer, quiet

    with quiet():
        tokenizer = load_tokenizer(loading)
        worker = BuildWorker(
            recipe,
            tokenizer,
            lambda: load_model(loading, tokenizer).model,
            max_memory=max_memory,
        )
        yield lambda jobs: [(number, getattr(worker, task)(job)) for number, (task, job) in jobs]


def _summary(output: Path, contents: CacheContents) -> str:
    """One line on what was made."""
    parts = [f"{len(arrays['ids']):,} {name} rows" for name, arrays in contents.tables.items()]
    if contents.corpus is not None:
        parts.append(f"{contents.corpus.num_prefixes:,} n-gram prefixes")
    size = sum(path.stat().st_size for path in output.iterdir()) / 1e6
    return f"{output}: {', '.join(parts)}; {size:.1f} MB"
