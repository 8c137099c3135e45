"""The fields of a request's body, one by one: each has a rule, which its refusal names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.errors import unknown_name
from selfspec.serving.refusal import Refused


class Fields:
    """The body of a request. A field that is null counts as left out."""

    def __init__(
        self,
        body: Any,
        known: Sequence[str],
        refused: Mapping[str, tuple[Sequence[Any], str]] | None = None,
    ) -> None:
        if not isinstance(body, dict):
            raise Refused(f"the body must be a JSON object (got a {type(body).__name__})")
        for name in body:
            if name not in known:
                raise Refused(unknown_name("field", str(name)[:40], known), field=str(name)[:40])
        self._given: Mapping[str, Any] = {k: v for k, v in body.items() if v is not None}
        for name, (allowed, why) in (refused or {}).items():
            self.only(name, allowed, why)

    def get(self, name: str) -> Any:
        """The value as it came; None where it was left out."""
        return self._given.get(name)

    def refuse(self, name: str, rule: str) -> Refused:
        """The error for a field, with its rule and the value."""
        return Refused(f"{name} must be {rule} (got {self.get(name)!r:.80})", field=name)

    def whole(self, name: str, least: int, most: int) -> int | None:
        """A whole number within limits."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number within limits."""
        value = self.get(name)
        if value is None:
            return None
        if not _is_number(value) or not least <= value <= most:
            raise self.refuse(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where it was left out."""
        value = self._given.get(name, False)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Text."""
        value = self.get(name)
        return None if value is None else checked_text(name, value)

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Refuses a field that asks for what is not done here."""
        if name in self._given and not any(_is_same(self.get(name), each) for each in allowed):
            raise Refused(f"{name} {why} (got {self.get(name)!r:.80})", field=name)

    def biases(self, name: str, vocab_size: int, most: int) -> dict[int, float]:
        """Token ids with a number from -100 to 100 for each."""
        value = self._given.get(name, {})
        if not isinstance(value, dict) or len(value) > most:
            raise self.refuse(name, f"an object with at most {most} token ids and their biases")
        found = {}
        for key, bias in value.items():
            if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
                rule = f"{name} must have ids of the model's {vocab_size} tokens as names"
                raise Refused(f"{rule} (got {key!r:.40})", field=name)
            if not _is_number(bias) or not -100 <= bias <= 100:
                rule = f"{name} must have numbers from -100 to 100 as values"
                raise Refused(f"{rule} (got {bias!r:.40})", field=name)
            found[int(key)] = float(bias)
        return found


def checked_text(name: str, value: Any) -> str:
    """Text that can be written as UTF-8; JSON may hold halves of characters."""
    if not isinstance(value, str):
        raise Refused(f"{name} must be text (got {value!r:.80})", field=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        rule = f"{name} must be whole characters"
        raise Refused(f"{rule} (got half of one at {error.start})", field=name) from None
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # A whole number beyond all floats.
        return False


def _is_same(given: Any, allowed: Any) -> bool:
    """Equal, and true is not 1."""
    return isinstance(given, bool) == isinstance(allowed, bool) and bool(given == allowed)
