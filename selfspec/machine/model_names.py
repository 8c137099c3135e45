"""Names of models: folders on this machine, and ids of the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from selfspec.errors import ConfigError

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILES = ("config.json", "adapter_config.json")  # Every model or adapter has one of them.


def check_model_name(name: str, option: str = "name") -> None:
    """Refuses what is neither a model's folder nor has the form of a Hub id. Needs no network."""
    path = Path(name)
    if any((path / file).is_file() for file in _FILES):
        return
    if not path.exists() and _HUB_ID.fullmatch(name):
        return
    raise ConfigError(
        f"{option} must be a folder with a config.json, or a Hub id such as "
        f"HuggingFaceTB/SmolLM2-135M-Instruct (got {name!r})"
    )


def file_here(name: str, file: str) -> Path:
    """Where a file of a model is on this machine, or would be; asks no network."""
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        if isinstance(path := try_to_load_from_cache(name, file), str):
            return Path(path)
    return Path(name) / file
