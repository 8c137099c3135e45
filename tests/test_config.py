"""Every knob is checked when it is set, and says its name, its rule and the value it got."""

import dataclasses
import inspect

import pytest

from selfspec.config import SOURCE_NAMES, SpecConfig
from selfspec.errors import ConfigError

KNOWN = ", ".join(sorted(SOURCE_NAMES))
COUNTS = ("max_nodes", "max_depth", "top_k")


def refusal(**knobs) -> str:
    with pytest.raises(ConfigError) as caught:
        SpecConfig(**knobs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "rule", "values"),
    [
        (COUNTS, ">= 1", (0, -3)),
        (COUNTS, "a whole number", (1.0, "4", None, True)),
        (("trust_hooks",), "True or False", (1, "yes", None)),
    ],
)
def test_numbers_and_switches_are_checked(names, rule, values):
    for name in names:
        for value in values:
            assert refusal(**{name: value}) == f"{name} must be {rule} (got {value!r})"


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"sources": "lut"}, "sources must be a list of names (got 'lut')"),
        ({"sources": None}, "sources must be a list of names (got None)"),
        ({"sources": 5}, "sources must be a list of names (got 5)"),
        ({"kept_kv": "300%"}, "kept_kv must be at most 100% of the free memory (got '300%')"),
        *(({name: 10**24}, f"{name} must be <= 65536 (got more)") for name in COUNTS),
        ({"sources": ("lut", "lut")}, "sources must not repeat a name (got ['lut', 'lut'])"),
        (
            {"sources": ("luts",)},
            f"unknown source 'luts'; did you mean 'lut'? (known: {KNOWN})",
        ),
        (
            {"budget": "mesured"},
            "unknown budget 'mesured'; did you mean 'measured'? (known: fixed, measured)",
        ),
        (
            {"learning": "sesion"},
            "unknown learning scope 'sesion'; did you mean 'session'? "
            "(known: frozen, request, session)",
        ),
        (
            {"forward": "grph"},
            "unknown forward 'grph'; did you mean 'graph'? (known: auto, eager, graph)",
        ),
    ],
)
def test_refused_values(knobs, message):
    assert refusal(**knobs) == message


def test_strict_says_what_took_its_place():
    with pytest.raises(ConfigError, match=r"strict is no knob any more \(got .*disabled_reason"):
        SpecConfig.of(strict=True)


def test_of_answers_an_unknown_name_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown knob 'max_node'; did you mean 'max_nodes'\?"):
        SpecConfig.of(max_node=3)
    assert SpecConfig.of(max_nodes=3) == SpecConfig(max_nodes=3)


def test_changed_is_a_checked_copy():
    config = SpecConfig(max_nodes=3, top_k=2)
    assert config.changed(top_k=5) == SpecConfig(max_nodes=3, top_k=5)
    assert config == SpecConfig(max_nodes=3, top_k=2)
    with pytest.raises(ConfigError, match="top_k must be >= 1"):
        config.changed(top_k=0)
    with pytest.raises(ConfigError, match="unknown knob 'k'"):
        config.changed(k=2)


def test_a_config_is_frozen_hashable_and_keyword_only():
    config = SpecConfig()
    assert config.sources == SOURCE_NAMES
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_nodes = 2
    assert len({config, SpecConfig()}) == 1
    with pytest.raises(TypeError):
        SpecConfig(16)


def test_sources_have_their_old_names_too():
    config = SpecConfig(sources=["texts", "lut", "runners"])
    assert config.sources == ("answers", "lut", "near_misses")


def test_every_knob_is_documented():
    for field in dataclasses.fields(SpecConfig):
        assert f"\n    {field.name}: " in inspect.cleandoc(SpecConfig.__doc__)
