"""`selfspec cache build`: from texts, or from a model's own answers, to a cache folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from selfspec.building.recipe import Recipe
from selfspec.cli.cache.recipe_options import RecipeOptions, recipe_of
from selfspec.cli.shared.messages import show_log, working
from selfspec.cli.shared.options import Flag, Model, ModelOptions
from selfspec.machine.memory import amount_in_bytes

if TYPE_CHECKING:
    from selfspec.building.progress import Bars
    from selfspec.store import CacheContents


def build(
    model: Model,
    output: Path,
    /,
    *,
    recipe: Path | None = None,
    max_memory: str = "1GB",
    restart: Flag = False,
    overwrite: Flag = False,
    keep_work: Flag = False,
    asked: ModelOptions = ModelOptions(),
    options: RecipeOptions = RecipeOptions(),
) -> None:
    """Build a cache from texts, or from the model's own answers to them.

    Run the same command again to go on with a build that was interrupted.

    Args:
        output: The cache folder to make.
        recipe: TOML file with the keys below; options override its keys.
        max_memory: Memory for counting n-grams, without the model. More: fewer parts to merge.
        restart: Begin anew, and delete what an interrupted build left.
        overwrite: Replace a cache folder that exists already.
        keep_work: Keep the work folder, with the model's answers in it.
    """
    loading = replace(asked, model=model)
    show_log(loading.verbose)
    from selfspec.cli.shared.model_loading import check_options

    wanted = recipe_of(recipe, options)
    check_options(loading)
    how = {
        "max_memory": amount_in_bytes(max_memory, name="--max-memory"),
        "restart": restart,
        "overwrite": overwrite,
        "keep_work": keep_work,
    }
    with ExitStack() as stack:
        contents = _Build(wanted, loading, how).run(output, stack)
    print(_summary(output, contents))


@dataclass(frozen=True)
class _Build:
    """A build as it was asked for."""

    recipe: Recipe
    loading: ModelOptions
    how: dict[str, Any]  # the arguments of `BuildOptions`

    def run(self, output: Path, stack: ExitStack) -> CacheContents:
        """Builds the cache; Ctrl-C leaves what is done by then for the next start."""
        with working(f"Loading the tokenizer of {self.loading.title}"):
            # Faults that show without a model are told first.
            from selfspec.building.inputs import find_inputs
            from selfspec.store import check_target

            find_inputs(self.recipe)
            check_target(output, overwrite=self.how["overwrite"])
            from selfspec.building.builder import Builder, BuildOptions
            from selfspec.building.progress import Bars
            from selfspec.cli.shared.model_loading import load_tokenizer, quiet

            stack.enter_context(quiet())
            tokenizer = load_tokenizer(self.loading)
        bars = Bars(Console(stderr=True))
        builder = Builder(
            self.recipe,
            tokenizer,
            lambda: self._model(tokenizer, bars),
            bars,
            BuildOptions(**self.how),
            model_name=self.loading.model,
        )
        stack.enter_context(bars)
        try:
            return builder.run(output)
        except KeyboardInterrupt:
            bars.say("interrupted; run the same command again to go on")
            raise

    def _model(self, tokenizer: Any, bars: Bars) -> Any:
        from selfspec.cli.shared.model_loading import load_model

        bars.say(f"Loading {self.loading.title} ...")
        return load_model(self.loading, tokenizer).model


def _summary(output: Path, contents: CacheContents) -> str:
    """One line on what was made."""
    parts = [f"{len(arrays['ids']):,} {name} rows" for name, arrays in contents.tables.items()]
    if contents.corpus is not None:
        parts.append(f"{contents.corpus.num_prefixes:,} n-gram prefixes")
    size = sum(path.stat().st_size for path in output.iterdir()) / 1e6
    return f"{output}: {', '.join(parts)}; {size:.1f} MB"
