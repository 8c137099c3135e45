"""Every exception selfspec raises on purpose, and how its message is put.

::

    SelfSpecError
    ├── ConfigError       (ValueError)   a knob has a value it can't have
    ├── UnsupportedError  (ValueError)   this generate() call can't be served
    ├── VocabularyError   (ValueError)   learned on another vocabulary
    └── AttachError       (TypeError)    this object can't be attached to

A message is name, rule, value got, and the fix where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "AttachError",
    "ConfigError",
    "SelfSpecError",
    "UnsupportedError",
    "VocabularyError",
    "unknown_name",
]


class SelfSpecError(Exception):
    """The root of the tree: catches whatever selfspec raises on purpose."""


class ConfigError(SelfSpecError, ValueError):
    """A knob of `SpecConfig` has a value or a name that it can't have."""


class UnsupportedError(SelfSpecError, ValueError):
    """A `generate()` call asks for something that drafting can't serve."""


class VocabularyError(SelfSpecError, ValueError):
    """What was learned belongs to a vocabulary of another size."""


class AttachError(SelfSpecError, TypeError):
    """The object has no `generate()` to attach to, or `assistant=` is no `SelfSpec`."""


def unknown_name(kind: str, got: str, known: Iterable[str]) -> str:
    """Message for a name that is not one of `known`, with the nearest one suggested.

    >>> unknown_name("knob", "max_node", ["max_nodes", "top_k"])
    "unknown knob 'max_node'; did you mean 'max_nodes'? (known: max_nodes, top_k)"
    """
    names = sorted(known)
    close = get_close_matches(got, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {got!r}{hint} (known: {', '.join(names)})"
