"""Fetches cache folders from the Hub into its local store, and uploads them.

huggingface_hub is imported only when it is used.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from selfspec.errors import CacheNotFoundError, CacheWriteError, one_line
from selfspec.store.card import CARD_FILE, FILES
from selfspec.store.contents import CacheContents
from selfspec.store.saving import write_files

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def locate(folder_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The folder on this machine; a Hub id that is no folder here is fetched."""
    folder = Path(folder_or_hub_id).expanduser()
    name = str(folder_or_hub_id)
    if folder.exists() or not _HUB_ID.fullmatch(name):
        if revision is not None:
            raise CacheNotFoundError(
                f"revision= must come with a Hub id such as 'owner/name' (got {name!r} with "
                f"revision {revision!r}); a folder has none"
            )
        return folder
    return _fetch(name, revision)


def push_cache(
    repo_id: str,
    contents: CacheContents,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Uploads contents to a model repository, which is made if needed; returns its URL.

    Files of an earlier cache are removed in the same commit; other files of the repository stay.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), contents)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message or "Upload a selfspec cache",
                delete_patterns=[CARD_FILE, *FILES],
            )
        except Exception as error:  # The client passes on errors of its HTTP library.
            raise CacheWriteError(
                f"{repo_id!r} on the Hub must be a repository that you can write "
                f"(got: {one_line(error)})"
            ) from error
    return f"https://huggingface.co/{repo_id}"


def _fetch(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=[CARD_FILE, *FILES])
    except Exception as error:  # The client passes on errors of its HTTP library.
        at = f" at revision {revision!r}" if revision else ""
        raise CacheNotFoundError(
            f"{repo_id!r} must be a cache folder or a repository of the Hub{at} "
            f"(got: {one_line(error)})"
        ) from error
    return Path(folder)
