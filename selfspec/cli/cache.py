"""`selfspec cache build` makes a cache, and `selfspec prepare` a folder that drafts by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from cyclopts import App
from cyclopts.types import ExistingDirectory

from selfspec.cli.loading import check_options
from selfspec.cli.messages import working
from selfspec.cli.options import GENERAL, Flag, Model, ModelOptions
from selfspec.errors import CliError, ConfigError

cache = App(
    name="cache",
    help="Build a cache.",
    group_arguments=GENERAL,
    group_parameters=GENERAL,
    sort_key=7,
)


@cache.command
def build(model: Model, output: Path, /, *, data: str, overwrite: Flag = False) -> None:
    """Build a cache from texts, among them the answers of 'selfspec batch'.

    Args:
        model: Folder or Hub id of the model whose tokenizer is used.
        output: The cache to make.
        data: A file, a folder or a glob: text files, or .jsonl whose lines have ids, a text, or
            messages.
        overwrite: Replace a cache that exists.
    """
    from selfspec.building import build_cache, find_files
    from selfspec.cache import check_target, save_cache
    from selfspec.cli.loading import load_tokenizer

    loading = ModelOptions(model=model)
    check_options(loading)
    if not output.name:
        raise CliError(f"OUTPUT must be the name of a file (got {str(output)!r})")
    check_target(output, overwrite=overwrite, option="--overwrite")
    find_files(data)  # Refuses a wrong path before anything is loaded.
    with working("Reading"):
        contents = build_cache(data, load_tokenizer(loading))
    save_cache(output, contents, overwrite=overwrite)
    about = contents.about
    print(f"{output}: {about['documents']:,} documents of {about['tokens']:,} tokens")


def prepare(
    folder: ExistingDirectory, /, *, cache: Path | None = None, overwrite: Flag = False
) -> None:
    """Let a model's folder draft by itself, wherever 'trust_remote_code' loads it.

    Args:
        folder: The folder with the model's weights, which gets 'custom_generate/generate.py'.
        cache: A cache to put beside the weights.
        overwrite: Replace files that are there already.
    """
    from selfspec.cache.file import FILE_NAME, file_of
    from selfspec.plugin.attach import hub_folder

    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"FOLDER must hold a model, with its config.json (got {str(folder)!r}); save one there "
            "with model.save_pretrained() and tokenizer.save_pretrained()"
        )
    files = {
        folder / "custom_generate" / "generate.py": hub_folder() / "custom_generate/generate.py"
    }
    if cache is not None:
        from selfspec.cache import load_cache
        from selfspec.cli.loading import load_tokenizer

        load_cache(cache, tokenizer=load_tokenizer(ModelOptions(model=str(folder))))
        files[folder / FILE_NAME] = file_of(cache)
    present = [path for path in files if path.exists()]
    if present and not overwrite:
        raise ConfigError(f"{str(present[0])!r} exists; use --overwrite to replace it")
    for path, source in files.items():
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, path)
    print(f"{folder} drafts now where it is loaded with trust_remote_code=True, as by")
    print(f"  transformers serve {folder} --trust-remote-code")
