"""Options are the knobs of `SpecConfig`, and records unfold into them."""

import dataclasses
import inspect
import warnings
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from selfspec import SpecConfig
from selfspec.cli.shared.options import Knobs, unfolds
from selfspec.errors import ConfigError


def test_every_knob_is_an_option():
    names = {field.name for field in dataclasses.fields(SpecConfig)} - {"rounding"}
    assert {option.name for option in Knobs.options()} == names


def test_defaults_are_the_libraries():
    assert Knobs().config() == SpecConfig()


@pytest.mark.parametrize(
    ("text", "sources"), [("lut", ("lut",)), (" context, lut ", ("context", "lut")), ("", ())]
)
def test_sources_are_named_with_commas(text, sources):
    assert Knobs(sources=text).config().sources == sources


def test_a_wrong_knob_is_told_by_the_config():
    with pytest.raises(ConfigError, match=r"threshold must be in \[0, 1\) \(got 1.0\)"):
        Knobs(threshold=1.0).config()


def test_an_old_name_is_said_in_plain_words(monkeypatch, caplog):
    def of(**_knobs):
        warnings.warn("forward='turned' is now 'auto'", DeprecationWarning, stacklevel=2)
        return SpecConfig()

    monkeypatch.setattr(SpecConfig, "of", of)
    with caplog.at_level("WARNING", logger="selfspec"):
        assert Knobs().config() == SpecConfig()
    assert caplog.messages == ["forward='turned' is now 'auto'"]


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option(help="How wide.")] = 3
    height: Annotated[int, typer.Option(help="How high.")] = 4


def test_a_record_unfolds_and_comes_back_filled():
    seen = []

    @unfolds
    def draw(size: Size, name: str, deep: int = 5) -> None:
        """Draws."""
        seen.append((size, name, deep))

    parameters = inspect.signature(draw).parameters
    assert set(parameters) == {"width", "height", "name", "deep"}
    assert parameters["height"].default == 4
    assert draw.__doc__ == "Draws."
    draw(width=1, height=2, name="box", deep=6)
    assert seen == [(Size(width=1, height=2), "box", 6)]
