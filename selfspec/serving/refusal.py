"""The error that a client gets, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A request that is not answered: an HTTP status, the rule, and the field that breaks it."""

    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code

    def as_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.field, "code": self.code}
        return {"error": error}
