"""Repositories of the Hub, without the Hub."""

from unittest.mock import Mock, call

import huggingface_hub
import pytest

from selfspec.cache import load_cache, save_cache
from selfspec.errors import CacheError
from tests.caches import contents, plain

FILE_NAME = "selfspec-cache.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Mock:
    """Downloads from the Hub, which always find a cache."""
    save_cache(tmp_path / "fetched", contents())
    download = Mock(return_value=str(tmp_path / "fetched.safetensors"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "model_info", Mock())
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
    hub.assert_not_called()
    assert load_cache("owner/name", revision="v2").about != {"n": 1}


@pytest.mark.parametrize(
    "name", ["./nowhere", "~/nowhere", "../owner/name", "nowhere", "a/b/c", ""]
)
def test_a_path_is_no_hub_id(hub, name):
    with pytest.raises(CacheError, match="by its file or its Hub id" if not name else "no"):
        load_cache(name)
    hub.assert_not_called()


def test_a_repository_that_is_not_there(hub, monkeypatch):
    """The Hub is asked once, and no download is tried."""
    broken = Mock(side_effect=huggingface_hub.errors.LocalEntryNotFoundError("no connection\n\n!"))
    monkeypatch.setattr(huggingface_hub, "model_info", broken)
    with pytest.raises(CacheError, match=r"'owner/name' .* 'v2' .*\(got: no connection\)$"):
        load_cache("owner/name", revision="v2")
    hub.assert_not_called()
