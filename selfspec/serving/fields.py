"""How the fields of requests are read, and how wrong ones are told.

This module knows no field, runs no model, and knows nothing of HTTP.
"""

from __future__ import annotations

import codecs
from reprlib import Repr
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from selfspec.errors import SelfSpecError, did_you_mean, one_line

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
        """An error as a client sees it: our own in full, and only the names of others."""
        if isinstance(error, RequestError):
            return error
        name = type(error).__name__
        if isinstance(error, SelfSpecError):
            return cls(one_line(error), field=field, code=name)
        why = f"the answer broke off by a fault of the server ({name}); its log says more"
        return cls(why, status=500, code=name)


class Fields(BaseModel):
    """Fields as JSON has them. One that is null counts as left out.

    A field with an alias has that name in requests and messages (`spelled`).
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()  # Fields that are accepted and change nothing.

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        left_out = {name for name, entry in value.items() if entry is None} | cls.ignored
        return {name: entry for name, entry in value.items() if name not in left_out}

    @classmethod
    def spelled(cls, name: str) -> str:
        return (cls.model_fields[name].alias or name) if name in cls.model_fields else name


Known = TypeVar("Known", bound=BaseModel)


def checked(model: type[Known], value: dict[str, Any]) -> Known:
    """The fields, checked. The error names the first wrong field, its rule and its value.

    The rule is in pydantic's words. If a field may have several forms, pydantic gives an error for
    each. The most nested one is of the form that was meant, and is the one that is told.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
    cause = wrong[0].get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        raise cause
    paths = [_path(value, error) for error in wrong]
    place = max((path for path in paths if path[0] == paths[0][0]), key=len)
    errors = [error for error, path in zip(wrong, paths, strict=True) if path == place]
    rules = (error["msg"].removeprefix("Value error, ") for error in errors)
    field, *inside = place
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part:.40}" for part in inside)
    said = f"{field:.40}{where}: {', or '.join(dict.fromkeys(rules))}"
    if errors[0]["type"] == "extra_forbidden" and not inside:
        names = [info.alias or name for name, info in model.model_fields.items()]
        said += did_you_mean(str(field), names)
    raise RequestError(f"{said} (got {_short.repr(errors[0]['input'])})", field=f"{field:.40}")


def _path(value: Any, error: ErrorDetails) -> list[int | str]:
    """Where in a value an error is, without the names that pydantic gives to forms."""
    path: list[int | str] = []
    for part in error["loc"]:
        if isinstance(value, dict):
            is_there = part in value
        else:
            is_there = isinstance(value, list) and part in range(len(value))
        if is_there:
            value = value[part]
            path.append(part)
    if error["type"] == "missing":
        return [*path, *error["loc"][-1:]]
    return path or [*error["loc"][:1]]  # A field that has come of others.


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """The object in some JSON, checked for broken characters; `what` names it in messages."""
    try:
        value = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"{what} must be JSON ({error})") from None
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be a JSON object (got a {type(value).__name__})")
    return value
