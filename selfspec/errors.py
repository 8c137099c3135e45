"""Every exception that selfspec raises on purpose: one tree below `SelfSpecError`.

Each is a built-in exception too. A message is name, rule, value got, and the fix if there is one.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class SelfSpecError(Exception):
    """The root of the tree: catches whatever selfspec raises on purpose."""


class ConfigError(SelfSpecError, ValueError):
    """A knob of `SpecConfig` has a value or a name that it can't have."""


class BuildError(SelfSpecError, ValueError):
    """A cache can't be built: its recipe, its data or its place is wrong."""


class UnsupportedError(SelfSpecError, ValueError):
    """A `generate()` call asks for something that drafting can't serve."""


class VocabularyError(SelfSpecError, ValueError):
    """Raised where what was learned belongs to a vocabulary of another size."""


class AttachError(SelfSpecError, TypeError):
    """The object has no `generate()` to attach to, or `assistant=` is no `SelfSpec`."""


class WeightsError(SelfSpecError, OSError):
    """A file of a streamed model's weights is missing, damaged, of another kind, or unreadable."""


class CliError(SelfSpecError, ValueError):
    """An option or a file is wrong. The command ends with one line and exit status 2."""


class CacheError(SelfSpecError, ValueError):
    """A cache can't be found, read or written, or belongs to another tokenizer."""


class _TracebackText(Exception):
    """The traceback of an error that is kept, as text."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def without_frames(error: Exception) -> Exception:
    """An error that may be kept for long: with its traceback as the text of its cause.

    A traceback itself holds what every function held that was running, tensors among them.
    """
    if not isinstance(error.__cause__, _TracebackText):  # An error may be kept again.
        text = "".join(traceback.format_exception(error))
        error.__cause__, error.__context__ = _TracebackText(text), None
    return error.with_traceback(None)


def shown(value: object) -> str:
    """A value as messages show it: on one line, or by its type if it is long.

    >>> shown([1, 2]), shown([None] * 99)
    ('[1, 2]', 'a list')
    """
    text = repr(value)
    if isinstance(value, str):
        return text[:80]
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def unknown_name(what: str, got: str, known: Iterable[str]) -> str:
    """Message for a name that is not one of `known`, with the nearest one suggested.

    >>> unknown_name("knob", "max_node", ["max_nodes", "top_k"])
    "unknown knob 'max_node'; did you mean 'max_nodes'? (known: max_nodes, top_k)"
    """
    names = sorted(known)
    return f"unknown {what} {got!r}{did_you_mean(got, names)} (known: {', '.join(names)})"


def check_names(what: str, names: Iterable[object], known: Collection[str]) -> None:
    """Refuses the first name that is not one of `known`."""
    for name in names:
        if name not in known:
            raise ConfigError(unknown_name(what, str(name), known))


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """The end of a message about a name, with the nearest one that is known; or nothing."""
    spelled = {name.lower(): name for name in known}
    close = get_close_matches(got.lower(), spelled, n=1)
    return f"; did you mean {spelled[close[0]]!r}?" if close else ""


def no_tokenizer(got: object) -> ConfigError:
    return ConfigError(
        f"tokenizer must be the model's tokenizer, as AutoTokenizer.from_pretrained(name) loads it "
        f"(got {shown(got)})"
    )


def first_mistake(error: ValidationError) -> str:
    """Where the first mistake is that pydantic has found, its rule, and the value there."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "JSON"
    return f"{where}: {first['msg']}, got {first['input']!r:.20}"


def one_line(message: object) -> str:
    """The first paragraph of another library's message, on one line, without control characters.

    >>> one_line("no such\\nmodel\\n\\nIf this is a private repository, ...")
    'no such model'
    """
    line = " ".join(str(message).strip().split("\n\n")[0].split())
    return "".join(filter(str.isprintable, line))
