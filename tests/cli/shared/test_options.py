"""Options are the knobs of `SpecConfig`, whose texts are written once."""

import dataclasses

import pytest

from selfspec import SpecConfig
from selfspec.cli.shared.options import Knobs, knob_texts
from selfspec.errors import ConfigError


def test_every_knob_is_an_option_with_a_text():
    names = [field.name for field in dataclasses.fields(SpecConfig)]
    assert [field.name for field in dataclasses.fields(Knobs)] == names == list(knob_texts())
    assert Knobs().config() == SpecConfig()


@pytest.mark.parametrize(
    ("text", "sources"), [("lut", "lut"), (" context, lut ", "context,lut"), ("", "")]
)
def test_sources_are_named_with_commas(run, plain_folder, text, sources, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "selfspec.cli.generate.checked", lambda _, config: asked.append(config) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        run("generate", plain_folder, "--sources", text, "--no-overlap")
    assert ",".join(asked[0].sources) == sources
    assert not asked[0].overlap


def test_a_wrong_knob_is_told_by_the_config():
    with pytest.raises(ConfigError, match=r"threshold must be in \[0, 1\) \(got 1.0\)"):
        Knobs(threshold=1.0).config()
