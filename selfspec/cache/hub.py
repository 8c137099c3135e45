"""A cache by its name: a file here, or the one file of a repository of the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from selfspec.cache.contents import CacheContents, Tokenizer, TokenizerInfo, tokenizer_info
from selfspec.cache.file import file_of, read_cache
from selfspec.errors import CacheError, one_line
from selfspec.machine.hub import ask_once

FILE_NAME = "selfspec-cache.safetensors"  # Its name in every repository.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def load_cache(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    tokenizer: Tokenizer | TokenizerInfo | None = None,
) -> CacheContents:
    """Loads a cache: the file of this name, the one in that folder, or what the Hub has.

    With a `revision`, the Hub is asked at once. Refuses a damaged cache and, with `tokenizer`, one
    of another tokenizer.
    """
    wanted = None if tokenizer is None else tokenizer_info(tokenizer)
    file_of(path_or_hub_id)  # Refuses what is no name.
    name = os.fspath(path_or_hub_id)
    if os.path.isfile(beside_weights := os.path.join(name, FILE_NAME)):
        name = beside_weights
    elif os.path.isfile(os.path.join(name, "config.json")):
        raise CacheError(
            f"{name!r} is the folder of a model, and no cache; to draft for it, load it, and call "
            "selfspec.attach(model) and generate(..., assistant=SelfSpec())"
        )
    path = file_of(name)
    if os.path.isfile(name) and not os.path.exists(path):
        raise CacheError(
            f"a cache must be a file that ends with .safetensors (got {name!r}, which is another "
            "file); name a cache, or make one with 'selfspec cache build'"
        )
    if revision is None and (os.path.exists(path) or not _HUB_ID.fullmatch(name)):
        return read_cache(path, wanted)
    from huggingface_hub import hf_hub_download

    try:
        ask_once(name, FILE_NAME, revision=revision)
        fetched = hf_hub_download(name, FILE_NAME, revision=revision)
    except Exception as error:  # Errors of the client's HTTP library have no common name.
        at = f" at revision {revision!r}" if revision else ""
        raise CacheError(
            f"{name!r} must be a cache or a repository of the Hub{at} with one in it "
            f"(got: {one_line(error)})"
        ) from error
    return read_cache(Path(fetched), wanted)
