"""Repositories of the Hub, without the Hub."""

from typing import ClassVar

import huggingface_hub
import pytest

from selfspec.cache import load_cache, push_cache, save_cache
from selfspec.errors import CacheError
from tests.caches import contents, plain

FILE_NAME = "selfspec-cache.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> list:
    """What was asked of `hf_hub_download`; it always finds a cache."""
    asked = []
    save_cache(tmp_path / "fetched", contents())

    def hf_hub_download(*asked_for, **options):
        asked.append((*asked_for, options))
        return str(tmp_path / "fetched.safetensors")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_hub_id_is_fetched(hub):
    assert plain(load_cache("owner/name")) == plain(contents())
    load_cache("owner/name", revision="v2")
    assert hub == [
        ("owner/name", FILE_NAME, {"revision": None}),
        ("owner/name", FILE_NAME, {"revision": "v2"}),
    ]


def test_what_is_here_goes_before_the_hub(hub, tmp_path):
    save_cache("owner/name", contents(about={"n": 1}))
    assert load_cache("owner/name").about == {"n": 1}
    (tmp_path / "owner" / "folder").mkdir()
    with pytest.raises(CacheError, match="is a folder"):
        load_cache("owner/folder")
    with pytest.raises(CacheError, match="revision= must come with a Hub id"):
        load_cache("owner/name", revision="v2")
    assert hub == []


@pytest.mark.parametrize(
    "name", ["./nowhere", "~/nowhere", "../owner/name", "nowhere", "a/b/c", ""]
)
def test_a_path_is_no_hub_id(hub, name):
    with pytest.raises(CacheError):
        load_cache(name)
    assert hub == []


def test_a_repository_that_is_not_there(monkeypatch):
    def broken(*_args, **_kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\n\nand much more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(CacheError) as raised:
        load_cache("owner/name", revision="v2")
    assert str(raised.value) == (
        "'owner/name' must be a cache or a repository of the Hub at revision 'v2' with one in it "
        "(got: no connection)"
    )


class FakeApi:
    """Keeps what it is asked."""

    calls: ClassVar[list] = []

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def create_repo(self, repo_id, **options):
        self.calls.append(("create_repo", repo_id, options))

    def create_branch(self, repo_id, **options):
        self.calls.append(("create_branch", repo_id, options))

    def upload_file(self, **options):
        self.calls.append(("upload_file", options))


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(FakeApi, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    return FakeApi


@pytest.mark.parametrize("branch", [None, "v2"])
def test_a_push_uploads_one_file(api, branch, tmp_path):
    """To a branch that is made where it is missing."""
    given = {"revision": branch, "private": True, "token": "secret", "commit_message": branch}
    assert push_cache("owner/name", contents(), **given) == "https://huggingface.co/owner/name"
    *before, (_, upload) = api.calls
    (tmp_path / FILE_NAME).write_bytes(upload.pop("path_or_fileobj"))
    assert plain(load_cache(tmp_path / FILE_NAME)) == plain(contents())
    assert upload == {
        "path_in_repo": FILE_NAME,
        "repo_id": "owner/name",
        "revision": branch,
        "commit_message": branch or "Upload a selfspec cache",
    }
    made = [("create_branch", "owner/name", {"branch": branch, "exist_ok": True})] * bool(branch)
    assert before == [
        ("token", "secret"),
        ("create_repo", "owner/name", {"private": True, "exist_ok": True}),
        *made,
    ]


def test_a_push_that_is_refused(api, monkeypatch):
    def broken(*_args, **_kwargs):
        raise PermissionError("403 Forbidden\n\nread this page")

    monkeypatch.setattr(FakeApi, "create_repo", broken)
    with pytest.raises(CacheError, match=r"that you can write \(got: 403 Forbidden\)$"):
        push_cache("owner/name", contents())
