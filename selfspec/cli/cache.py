"""`selfspec cache build`: from texts to a cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from cyclopts import App

from selfspec.cli.loading import check_options
from selfspec.cli.messages import working
from selfspec.cli.options import GENERAL, Flag, Model, ModelOptions, NotNegative
from selfspec.errors import CliError

cache = App(
    name="cache",
    help="Build a cache.",
    group_arguments=GENERAL,
    group_parameters=GENERAL,
    sort_key=7,
)


@cache.command
def build(
    model: Model,
    output: Path,
    /,
    *,
    data: str,
    warmup_tokens: NotNegative = 1_000_000,
    overwrite: Flag = False,
    options: ModelOptions = ModelOptions(),
) -> None:
    """Build a cache from texts, among them the answers of 'selfspec batch'.

    Args:
        output: The cache to make.
        data: A file, a folder or a glob: text files, or .jsonl whose lines have ids, a text, or
            messages.
        warmup_tokens: About how many tokens the model reads. 0: only texts are kept.
        overwrite: Replace a cache that exists.
    """
    from selfspec.building import find_files
    from selfspec.cache import check_target, save_cache

    loading = replace(options, model=model)
    check_options(loading)
    if not output.name:
        raise CliError(f"OUTPUT must be the name of a file (got {str(output)!r})")
    check_target(output, overwrite=overwrite, option="--overwrite")
    find_files(data)  # Refuses a wrong path before anything is loaded.
    with working(f"Loading {loading.title}") as say:
        from selfspec.building import build_cache
        from selfspec.cli.loading import load_model, load_tokenizer

        contents = build_cache(
            data,
            load_tokenizer(loading),
            partial(load_model, loading),
            num_tokens=warmup_tokens,
            say=say,
        )
    save_cache(output, contents, overwrite=overwrite)
    about = contents.about
    print(
        f"{output}: {about['documents']:,} documents of {about['tokens']:,} tokens, of which the "
        f"model has read {about.get('tokens_read', 0):,}"
    )
    if about["left_out"]:
        print(f"left out (empty, or messages that no chat template takes): {about['left_out']:,}")
