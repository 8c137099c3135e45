"""Whether the Hub has to be asked for a repository, and whether it can be."""

from __future__ import annotations

_PATIENCE = 10.0  # Seconds in which the Hub has to answer.


def ask_once(name: str, *files: str, revision: str | None = None) -> None:
    """Asks the Hub for a repository of which none of these files is on this machine.

    Raises its error. Without this, loaders ask for file after file, and each of them is tried for
    half a minute where the Hub can't be reached.
    """
    from huggingface_hub import model_info, try_to_load_from_cache

    here = (try_to_load_from_cache(name, file, revision=revision) for file in files)
    if not any(isinstance(path, str) for path in here):
        model_info(name, revision=revision, timeout=_PATIENCE)
