"""Repositories of the Hub, without the Hub."""

import shutil
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

from selfspec.errors import CacheNotFoundError, CacheWriteError
from selfspec.store import load_cache, push_cache
from tests.caches import FILES, contents, plain


@pytest.fixture
def hub(folder, monkeypatch) -> list:
    """What was asked of `snapshot_download`; it always finds `folder`."""
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append((repo_id, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_hub_id_is_fetched(hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert plain(load_cache("owner/name")) == plain(contents())
    load_cache("owner/name", revision="v2")
    patterns = ["cache.json", *FILES]
    assert hub == [
        ("owner/name", {"revision": None, "allow_patterns": patterns}),
        ("owner/name", {"revision": "v2", "allow_patterns": patterns}),
    ]


def test_a_folder_that_exists_goes_before_the_hub(hub, folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)
    load_cache(f"{folder.parent.name}/{folder.name}")
    assert hub == []


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/where", "~/nowhere", "../owner/name", "nowhere", "a/b/c", "", "a/"]
)
def test_a_path_is_no_hub_id(hub, name):
    with pytest.raises(CacheNotFoundError):
        load_cache(name)
    assert hub == []


def test_a_folder_has_no_revisions(hub, folder):
    with pytest.raises(CacheNotFoundError, match="revision= must come with a Hub id"):
        load_cache(folder, revision="v2")


@pytest.mark.parametrize(
    "error",
    [
        huggingface_hub.errors.LocalEntryNotFoundError("no connection\n\nand much more"),
        huggingface_hub.errors.HFValidationError("no connection"),
        huggingface_hub.errors.OfflineModeIsEnabled("no connection"),
    ],
)
def test_a_repository_that_is_not_there(monkeypatch, error):
    def broken(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(CacheNotFoundError) as raised:
        load_cache("owner/name", revision="v2")
    assert str(raised.value) == (
        "'owner/name' must be a cache folder or a repository of the Hub at revision 'v2' "
        "(got: no connection)"
    )


class FakeApi:
    """Keeps what it is asked, and the folder that is uploaded."""

    calls: ClassVar[list] = []
    kept: ClassVar[Path]

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", repo_id, options))

    def create_branch(self, repo_id, **options):
        self.calls.append(("create_branch", repo_id, options))

    def upload_folder(self, *, folder_path, **options):
        shutil.copytree(folder_path, self.kept)
        self.calls.append(("upload_folder", options))


@pytest.fixture
def api(monkeypatch, tmp_path):
    monkeypatch.setattr(FakeApi, "calls", [])
    monkeypatch.setattr(FakeApi, "kept", tmp_path / "uploaded", raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    return FakeApi


@pytest.mark.parametrize("branch", [None, "v2"])
def test_a_push_uploads_a_whole_folder(api, branch):
    """To a branch that is made where it is missing."""
    given = {"revision": branch, "private": True, "token": "secret", "commit_message": branch}
    assert push_cache("owner/name", contents(), **given) == "https://huggingface.co/owner/name"
    assert plain(load_cache(api.kept)) == plain(contents())
    upload = {
        "repo_id": "owner/name",
        "revision": branch,
        "commit_message": branch or "Upload a selfspec cache",
        "delete_patterns": ["cache.json", *FILES],
    }
    made = [("create_branch", "owner/name", {"branch": branch, "exist_ok": True})] * bool(branch)
    assert api.calls == [
        ("token", "secret"),
        ("create_repo", "owner/name", {"private": True, "exist_ok": True}),
        *made,
        ("upload_folder", upload),
    ]


@pytest.mark.parametrize("kind", [PermissionError, HfHubHTTPError.__mro__[1]])
def test_a_push_that_is_refused(api, monkeypatch, kind):
    def broken(*_args, **_kwargs):
        raise kind("403 Forbidden\n\nread this page")

    monkeypatch.setattr(FakeApi, "create_repo", broken)
    with pytest.raises(CacheWriteError, match=r"that you can write \(got: 403 Forbidden\)$"):
        push_cache("owner/name", contents())
    assert [call[0] for call in api.calls] == ["token"]
