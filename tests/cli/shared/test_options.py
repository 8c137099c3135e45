"""Options are knobs of `SpecConfig`, whose texts are written once."""

import pytest

from selfspec import SpecConfig
from selfspec.cli.shared.options import Knobs


def test_knobs_have_the_names_and_defaults_of_the_config():
    assert Knobs().config() == SpecConfig()


def test_a_chat_has_longer_answers_whatever_else_is_asked(run, plain_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "selfspec.cli.chat.chat_command.checked", lambda options, _: asked.append(options) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        run("chat", plain_folder, "--temperature", "0")
    assert asked[0].max_new_tokens == 512


@pytest.mark.parametrize(
    ("text", "sources"), [("lut", ("lut",)), (" context, lut ", ("context", "lut")), ("", ())]
)
def test_sources_are_named_with_commas(run, plain_folder, text, sources, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "selfspec.cli.generate.checked", lambda _, config: asked.append(config) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        run("generate", plain_folder, "--sources", text, "--strict")
    assert asked == [SpecConfig(sources=sources, strict=True)]
