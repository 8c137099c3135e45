"""How the fields of requests are read, and how wrong ones are told.

This module knows no field but those that ask for nothing, runs no model, and knows nothing of HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from reprlib import Repr
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from selfspec.errors import SelfSpecError, one_line, unknown_name

_short = Repr()
_short.maxstring = _short.maxother = 80


class RequestError(SelfSpecError, ValueError):
    """A request, or a line of a prompt file, that can't be answered, and which field is wrong."""

    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code

    @classmethod
    def of(cls, error: Exception, *, field: str | None = None) -> RequestError:
        """What a client gets to know: the words of our own errors, and only the names of others."""
        if isinstance(error, RequestError):
            return error
        name = type(error).__name__
        if isinstance(error, SelfSpecError):
            return cls(one_line(error), field=field, code=name)
        why = f"the answer broke off by a fault of the server ({name}); its log says more"
        return cls(why, status=500, code=name)


def whole_characters(text: str) -> str:
    """Refuses halves of characters, which JSON can have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be whole characters, not half of one at {error.start}") from None
    return text


# The values of fields that ask for nothing, in OpenAI's protocol and in vLLM's. Those that are no
# fields of the models below are not served here.
NOTHING: dict[str, Any] = {
    "background": False,
    "best_of": 1,
    "conversation": None,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": "none",
    "functions": [],
    "logprobs": False,
    "max_completion_tokens": -1,
    "max_tokens": -1,
    "modalities": ["text"],
    "presence_penalty": 0,
    "previous_response_id": None,
    "reasoning": None,
    "response_format": {"type": "text"},
    "seed": -1,
    "stop": [],
    "store": False,
    "suffix": "",
    "text": {"format": {"type": "text"}},
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}


class Fields(BaseModel):
    """Fields as JSON has them. One that is null or asks for nothing counts as left out.

    A field with an alias has that name in requests and messages (`spelled`).
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    # Of what was answered before and comes back, that a model is not shown; and hints.
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _that_ask(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        fields = {name: entry for name, entry in value.items() if name not in cls.ignored}
        return {name: entry for name, entry in fields.items() if not _asks_nothing(name, entry)}

    @classmethod
    def spelled(cls, name: str) -> str:
        return (cls.model_fields[name].alias or name) if name in cls.model_fields else name


def _asks_nothing(name: str, value: object) -> bool:
    nothing = NOTHING.get(name)
    same_kind = isinstance(value, bool) == isinstance(nothing, bool)
    return value is None or (same_kind and bool(value == nothing))


Known = TypeVar("Known", bound=BaseModel)


def checked(model: type[Known], value: object) -> Known:
    """The fields, checked. The error names the first wrong field, its rule and its value."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    cause = wrong[0].get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        raise cause
    path, first = _innermost(value, wrong)
    name, *inside = path or ("the value",)
    field = str(name)[:40]
    got, rule = _short.repr(first["input"]), _rule(first)
    known = [field_info.alias or name for name, field_info in model.model_fields.items()]
    if issubclass(model, Fields) and field in NOTHING and field not in known:
        rule = f"be {NOTHING[field]!r} or left out, since it is not served here"
    elif first["type"] == "extra_forbidden" and not inside:
        raise RequestError(unknown_name("field", field, known), field=field)
    elif first["type"] == "extra_forbidden":
        rule = "be left out, since it is not known here"
    elif first["type"] == "missing":
        rule, got = "be given", "nothing"
    else:  # Where a field may have several forms, all that it could have been.
        same = [error for error in wrong if _path(value, error) == path]
        rule = ", or ".join(dict.fromkeys(map(_rule, same)))
    where = field + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part:.40}" for part in inside
    )
    where = f"each key of {where}" if "[key]" in first["loc"] else where
    raise RequestError(f"{where} must {rule} (got {got})", field=field)


def _innermost(
    value: object, wrong: Sequence[ErrorDetails]
) -> tuple[list[int | str], ErrorDetails]:
    """Of the first wrong field the error that is deepest in it, and where that is.

    Where a field may have several forms, each form has an error. One that has the form but a wrong
    part says so inside of it.
    """
    paths = [_path(value, error) for error in wrong]
    start = len(paths[0])
    inside = [n for n, path in enumerate(paths) if path[:start] == paths[0]]
    deepest = max(inside, key=lambda n: len(paths[n]))
    return paths[deepest], wrong[deepest]


def _path(value: Any, error: ErrorDetails) -> list[int | str]:
    """Where in a value an error is, without the names that pydantic gives to forms."""
    *parts, last = error["loc"] or ("",)
    path: list[int | str] = []
    for part in parts[:-1] if last == "[key]" else [*parts, last]:
        is_key = isinstance(value, dict) and part in value
        if is_key or (isinstance(value, list) and part in range(len(value))):
            value = value[part]
        elif error["type"] != "missing" or part is not last:
            continue
        path.append(part)
    return path


def _rule(error: ErrorDetails) -> str:
    rule = re.sub(r"^(Value error, must|\w+ should) ", "", error["msg"])
    return re.sub(r"be a valid dictionary( or instance of \w+)?$", "be an object", rule)


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """What JSON says, which must be an object; `what` names it in messages."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise RequestError(f"{what} must be JSON ({why})") from None
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be a JSON object (got a {type(value).__name__})")
    return value
