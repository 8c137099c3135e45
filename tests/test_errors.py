"""One tree of exceptions, each of them a built-in too; messages that suggest the nearest name."""

import sys

import pytest

import selfspec
from selfspec import errors
from selfspec.errors import CliError, SelfSpecError, unknown_name

CLASSES = [value for name, value in vars(errors).items() if name.endswith("Error")]


def test_each_is_in_the_tree_and_a_builtin_as_well_and_the_package_exports_it():
    """But for what ends a command, which nobody catches."""
    builtins = {"AttachError": TypeError, "WeightsError": OSError}
    for error in CLASSES:
        assert issubclass(error, SelfSpecError)
        if error is not SelfSpecError:
            assert issubclass(error, builtins.get(error.__name__, ValueError))
        assert error is CliError or getattr(selfspec, error.__name__) is error


def test_unknown_name_far_from_all_lists_them():
    message = unknown_name("source", "zzz", iter(["lut", "context"]))
    assert message == "unknown source 'zzz' (known: context, lut)"


def test_a_version_of_transformers_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "selfspec.plugin", None)
    with pytest.raises(ImportError, match=r"import of selfspec\.plugin halted"):
        _ = selfspec.attach
    monkeypatch.setattr(selfspec.metadata, "version", lambda _: "4.57.1")
    with pytest.raises(ImportError, match=r"transformers 5\.17 to 5\.24, and this is 4\.57\.1"):
        _ = selfspec.attach
    with pytest.raises(AttributeError) as caught:
        _ = selfspec.Selfspec
    assert caught.value.name == "Selfspec"
