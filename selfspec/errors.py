"""Every exception that selfspec raises on purpose: one tree below `SelfSpecError`.

Each is a built-in exception too. A message is name, rule, value got, and the fix if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SelfSpecError(Exception):
    """The root of the tree: catches whatever selfspec raises on purpose."""


class ConfigError(SelfSpecError, ValueError):
    """A knob of `SpecConfig` has a value or a name that it can't have."""


class BuildError(SelfSpecError, ValueError):
    """A recipe, its data or the place to build in stand in the way of building a cache."""


class UnsupportedError(SelfSpecError, ValueError):
    """A `generate()` call asks for something that drafting can't serve."""


class VocabularyError(SelfSpecError, ValueError):
    """What was learned belongs to a vocabulary of another size."""


class AttachError(SelfSpecError, TypeError):
    """The object has no `generate()` to attach to, or `assistant=` is no `SelfSpec`."""


class WeightsError(SelfSpecError, OSError):
    """A file of a streamed model's weights is missing, damaged, of another kind, or unreadable."""


class CliError(SelfSpecError, ValueError):
    """An option or a file is wrong. The command ends with one line and exit status 2."""


class CacheError(SelfSpecError, ValueError):
    """A cache folder can't be used or can't be written."""


class CacheNotFoundError(CacheError):
    """There is no cache folder, neither here nor on the Hub."""


class CacheExistsError(CacheError):
    """There is something already where a cache folder shall be written."""


class CacheWriteError(CacheError):
    """A cache folder can't be written: no room, no permission, no connection."""


class CacheCardError(CacheError):
    """The card of a cache folder is not what selfspec writes."""


class CacheVersionError(CacheError):
    """A cache folder has a format that a newer selfspec wrote."""


class CacheTokenizerError(CacheError):
    """A cache folder belongs to another tokenizer, or nobody said to which."""


class CachePathError(CacheError):
    """The card of a cache folder names a file outside of it."""


class CacheFileError(CacheError):
    """A file that the card names is missing or can't be read."""


class CacheSizeError(CacheError):
    """A file has another size than the card says: it was cut off, or grew."""


class CacheChecksumError(CacheError):
    """A file has the right size and other bytes than those that were written."""


class CacheFormatError(CacheError):
    """A file with the right checksum holds no tables, or such as can't be."""


def unknown_name(kind: str, got: str, known: Iterable[str]) -> str:
    """Message for a name that is not one of `known`, with the nearest one suggested.

    >>> unknown_name("knob", "max_node", ["max_nodes", "top_k"])
    "unknown knob 'max_node'; did you mean 'max_nodes'? (known: max_nodes, top_k)"
    """
    names = sorted(known)
    close = get_close_matches(got, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {got!r}{hint} (known: {', '.join(names)})"


def one_line(message: object) -> str:
    """The first paragraph of another library's message, on one line.

    >>> one_line("no such\\nmodel\\n\\nIf this is a private repository, ...")
    'no such model'
    """
    return " ".join(str(message).strip().split("\n\n")[0].split())
