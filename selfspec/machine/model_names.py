"""Names of models: folders on this machine, and ids of the Hub, which is asked once."""

from __future__ import annotations

import re
from pathlib import Path

from selfspec.errors import ConfigError, one_line

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILES = ("config.json", "adapter_config.json")  # Every model or adapter has one of them.
_PATIENCE = 10.0  # Seconds in which the Hub has to answer.


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


def find_model(name: str, option: str = "name") -> None:
    """Refuses a name that is no model, here or on the Hub, also if the Hub can't be asked.

    The Hub is asked once. Without this, each file that a loader looks for is tried for half a
    minute where the Hub can't be reached.
    """
    check_model_name(name, option)
    from huggingface_hub import model_info, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if Path(name).exists():
        return
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
        return
    try:
        model_info(name, timeout=_PATIENCE)
    except RepositoryNotFoundError as error:
        why = "the Hub has no such model, or only for users who are logged in"
        raise ConfigError(_no_model(name, option, why)) from error
    except HfHubHTTPError:
        return  # A mirror may answer for files only. The loader says what is wrong.
    except Exception as error:  # Errors of the client's HTTP library have no name of their own.
        why = f"the Hub's cache has no such model, and the Hub can't be asked: {one_line(error)}"
        raise ConfigError(_no_model(name, option, why)) from error


def file_here(name: str, file: str) -> Path:
    """Where a file of a model is on this machine, or would be; asks no network."""
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        if isinstance(path := try_to_load_from_cache(name, file), str):
            return Path(path)
    return Path(name) / file


def _no_model(name: str, option: str, why: str) -> str:
    return (
        f"{option} must be a folder with a config.json, or the id of a model on the Hub (got "
        f"{name!r}, which is no folder here; {why})"
    )
