"""Repositories of the Hub, without the Hub."""

from unittest.mock import Mock, call

import huggingface_hub
import pytest

from selfspec.cache import load_cache, push_cache, save_cache
from selfspec.errors import CacheError
from tests.caches import contents, plain

FILE_NAME = "selfspec-cache.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Mock:
    """Downloads from the Hub, which always find a cache."""
    save_cache(tmp_path / "fetched", contents())
    download = Mock(return_value=str(tmp_path / "fetched.safetensors"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    return download


def test_a_hub_id_is_fetched(hub):
    assert plain(load_cache("owner/name")) == plain(contents())
    load_cache("owner/name", revision="v2")
    asked = [call("owner/name", FILE_NAME, revision=revision) for revision in (None, "v2")]
    assert hub.call_args_list == asked


def test_what_is_here_goes_before_the_hub(hub):
    save_cache("owner/name", contents(about={"n": 1}))
    assert load_cache("owner/name").about == {"n": 1}
    with pytest.raises(CacheError, match="revision= must come with a Hub id"):
        load_cache("owner/name", revision="v2")
    hub.assert_not_called()


@pytest.mark.parametrize(
    "name", ["./nowhere", "~/nowhere", "../owner/name", "nowhere", "a/b/c", ""]
)
def test_a_path_is_no_hub_id(hub, name):
    with pytest.raises(CacheError):
        load_cache(name)
    hub.assert_not_called()


def test_a_repository_that_is_not_there(monkeypatch):
    broken = Mock(side_effect=huggingface_hub.errors.LocalEntryNotFoundError("no connection\n\n!"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", broken)
    with pytest.raises(CacheError, match=r"'owner/name' .* 'v2' .*\(got: no connection\)$"):
        load_cache("owner/name", revision="v2")


@pytest.fixture
def api(monkeypatch) -> Mock:
    """The Hub, which keeps what it is asked."""
    api = Mock()
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    return api


@pytest.mark.parametrize("branch", [None, "v2"])
def test_a_push_uploads_one_file(api, branch, tmp_path):
    """To a branch that is made where it is missing."""
    given = {"revision": branch, "private": True, "token": "secret", "commit_message": branch}
    assert push_cache("owner/name", contents(), **given) == "https://huggingface.co/owner/name"
    api.assert_called_once_with(token="secret")
    hub = api.return_value
    hub.create_repo.assert_called_once_with("owner/name", private=True, exist_ok=True)
    made = [call("owner/name", branch=branch, exist_ok=True)] if branch else []
    assert hub.create_branch.call_args_list == made
    upload = hub.upload_file.call_args.kwargs
    (tmp_path / FILE_NAME).write_bytes(upload.pop("path_or_fileobj"))
    assert plain(load_cache(tmp_path / FILE_NAME)) == plain(contents())
    assert upload == {
        "path_in_repo": FILE_NAME,
        "repo_id": "owner/name",
        "revision": branch,
        "commit_message": branch or "Upload a selfspec cache",
    }


def test_a_push_that_is_refused(api):
    api.return_value.create_repo.side_effect = PermissionError("403 Forbidden\n\nread this page")
    with pytest.raises(CacheError, match=r"\(got: 403 Forbidden\)$"):
        push_cache("owner/name", contents())
