"""Models and files by their names: here, or on the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from selfspec.errors import ConfigError

MODEL_FILES = ("config.json", "adapter_config.json")  # Every model or adapter has one of them.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PATIENCE = 10.0  # Seconds in which the Hub has to answer.


def check_model_name(name: str, option: str) -> None:
    """Refuses what is neither a model's folder nor has the form of a Hub id."""
    path = Path(name)
    has_form = not path.exists() and _HUB_ID.fullmatch(name)
    if not has_form and not any((path / file).is_file() for file in MODEL_FILES):
        raise ConfigError(
            f"{option} must be a folder with a config.json, or a Hub id such as "
            f"HuggingFaceTB/SmolLM2-135M-Instruct (got {name!r})"
        )


def find_file(name: str, file: str, *, fetches: bool = True) -> Path | None:
    """A file of a folder, or of a repository on the Hub; None if it has no such file.

    Unless it `fetches`, the file must have been downloaded before, and no network is asked.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    if Path(name).is_dir():
        path = Path(name, file)
        return path if path.is_file() else None
    try:
        fetched = (hf_hub_download if fetches else try_to_load_from_cache)(name, file)
    except (EntryNotFoundError, HFValidationError):
        return None
    return Path(fetched) if isinstance(fetched, str) else None


def ask_once(name: str, *files: str, revision: str | None = None) -> None:
    """Asks the Hub for a repository of which none of these files is on this machine.

    Raises its error. Without this, loaders ask for file after file, and each of them is tried for
    half a minute where the Hub can't be reached.
    """
    from huggingface_hub import model_info, try_to_load_from_cache

    here = (try_to_load_from_cache(name, file, revision=revision) for file in files)
    if not any(isinstance(path, str) for path in here):
        model_info(name, revision=revision, timeout=_PATIENCE)
