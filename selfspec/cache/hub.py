"""A cache by its name: a file here, or the one file of a repository of the Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from selfspec.cache.contents import CacheContents, Tokenizer, TokenizerInfo, tokenizer_info
from selfspec.cache.file import as_bytes, file_of, read_cache
from selfspec.errors import CacheError, one_line, shown

FILE_NAME = "selfspec-cache.safetensors"  # Its name in every repository.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def load_cache(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    tokenizer: Tokenizer | TokenizerInfo | None = None,
) -> CacheContents:
    """Loads a cache. Refuses a damaged one and, with `tokenizer`, one of another tokenizer."""
    wanted = None if tokenizer is None else tokenizer_info(tokenizer)
    return read_cache(locate(path_or_hub_id, revision), wanted)


def locate(path_or_hub_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The file on this machine; a Hub id that is no file here is fetched."""
    if not isinstance(path_or_hub_id, (str, os.PathLike)):
        raise CacheError(f"a cache must be a file or a Hub id (got {shown(path_or_hub_id)})")
    name = os.fspath(path_or_hub_id)
    if os.path.isfile(os.path.join(name, "config.json")):
        raise CacheError(
            f"{name!r} is the folder of a model, and no cache; to draft for it, load it, and call "
            "selfspec.attach(model) and generate(..., assistant=SelfSpec())"
        )
    path = file_of(name)
    if os.path.exists(path) or not _HUB_ID.fullmatch(name):
        if revision is not None:
            raise CacheError(
                f"revision= must come with a Hub id such as 'owner/name' (got {name!r} with "
                f"revision {revision!r}); a file has none"
            )
        return path
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, FILE_NAME, revision=revision))
    except Exception as error:  # Errors of the client's HTTP library have no common name.
        at = f" at revision {revision!r}" if revision else ""
        raise CacheError(
            f"{name!r} must be a cache or a repository of the Hub{at} with one in it "
            f"(got: {one_line(error)})"
        ) from error


def push_cache(
    repo_id: str,
    contents: CacheContents,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Uploads contents to a model repository, which is made if needed; returns its URL."""
    from huggingface_hub import HfApi

    data = as_bytes(contents)
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        api.upload_file(
            path_or_fileobj=data,
            path_in_repo=FILE_NAME,
            repo_id=repo_id,
            revision=revision,
            commit_message=commit_message or "Upload a selfspec cache",
        )
    except Exception as error:  # As in `locate`.
        raise CacheError(
            f"{repo_id!r} on the Hub must be a repository that you can write "
            f"(got: {one_line(error)})"
        ) from error
    return f"https://huggingface.co/{repo_id}"
