"""Names of models: the Hub is asked once, and what is wrong is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from selfspec import ConfigError
from selfspec.machine.model_names import check_model_name, find_model


class Missing(RepositoryNotFoundError):
    """Made without a response, whose class differs between versions of the Hub's client."""

    def __init__(self) -> None:
        Exception.__init__(self, "404")


class NotAllowed(HfHubHTTPError):
    def __init__(self) -> None:
        Exception.__init__(self, "405")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the Hub answer with an error; returns the names that it was asked for."""
    names: list[str] = []

    def answer(error: Exception) -> list[str]:
        def model_info(name: str, **_options: Any) -> None:
            names.append(name)
            raise error

        monkeypatch.setattr(huggingface_hub, "model_info", model_info)
        return names

    return answer


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConnectionError("no network"), "the Hub can't be asked: no network"),
        (Missing(), "the Hub has no such model"),
    ],
)
def test_what_is_nowhere_is_refused_after_one_question(
    asked: Any, error: Exception, why: str
) -> None:
    names = asked(error)
    with pytest.raises(ConfigError, match=f"'owner/nothing', which is no folder here.*{why}"):
        find_model("owner/nothing")
    assert names == ["owner/nothing"]


def test_a_mirror_without_that_route_is_left_to_the_loader(asked: Any) -> None:
    names = asked(NotAllowed())
    find_model("owner/model")
    assert names == ["owner/model"]


def test_folders_and_what_is_in_the_cache_ask_nobody(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = asked(ConnectionError())
    (tmp_path / "adapter_config.json").touch()
    find_model(str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    find_model("owner/model")
    assert not names


@pytest.mark.parametrize("name", ["/nowhere/at all", "a/b/c", "", "two words"])
def test_what_has_no_form_of_a_name_is_refused(name: str, tmp_path: Path) -> None:
    for each in (name, str(tmp_path)):
        with pytest.raises(ConfigError, match=r"MODEL must be a folder with a config\.json"):
            check_model_name(each, "MODEL")
