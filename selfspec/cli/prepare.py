"""`selfspec prepare`: a model's folder with which other programs draft without a line of code."""

from __future__ import annotations

import shutil
from pathlib import Path

from cyclopts.types import ExistingDirectory

from selfspec.cli.options import Flag, ModelOptions
from selfspec.errors import ConfigError


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
