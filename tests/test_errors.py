"""One tree of exceptions, each of them a built-in too; messages that suggest the nearest name."""

import pytest

from selfspec import errors
from selfspec.errors import SelfSpecError, unknown_name

CLASSES = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


def test_every_error_is_in_the_tree_and_drawn():
    for error in CLASSES:
        assert issubclass(error, SelfSpecError)
        assert error.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("BuildError", ValueError),
        ("UnsupportedError", ValueError),
        ("VocabularyError", ValueError),
        ("AttachError", TypeError),
        ("CacheError", ValueError),
    ],
)
def test_each_is_a_builtin_as_well(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_the_package_exports_them():
    import selfspec

    for error in CLASSES:
        assert getattr(selfspec, error.__name__) is error


def test_unknown_name_suggests_the_nearest():
    assert unknown_name("source", "contxt", ["lut", "context"]) == (
        "unknown source 'contxt'; did you mean 'context'? (known: context, lut)"
    )


def test_unknown_name_far_from_all_lists_them():
    message = unknown_name("source", "zzz", iter(["lut", "context"]))
    assert message == "unknown source 'zzz' (known: context, lut)"
