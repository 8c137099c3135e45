"""A request's body, read within limits, and work that ends when its client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from selfspec.serving.refusal import Refused

T = TypeVar("T")

_PATIENCE = 30.0  # Seconds in which a body has to come.


class Gone(Exception):
    """Nobody waits for the answer any more."""


async def read_json(request: Any, max_bytes: int) -> Any:
    """The body as JSON; refuses a long one before it is read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(f"Content-Type must be application/json (got {kind!r:.60})", status=415)
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > max_bytes:
        raise _too_long(max_bytes, declared)
    try:
        data = await asyncio.wait_for(_body(request, max_bytes), _PATIENCE)
    except asyncio.TimeoutError:
        raise Refused(f"the body must come within {_PATIENCE:.0f} seconds", status=408) from None
    try:
        return json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise Refused(f"the body must be JSON ({why})") from None


async def _body(request: Any, max_bytes: int) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise _too_long(max_bytes, f"more than {max_bytes}")
    return bytes(data)


def _too_long(max_bytes: int, got: str) -> Refused:
    rule = f"the body must have at most {max_bytes} bytes"
    return Refused(f"{rule} (got {got:.40})", status=413, code="body_too_long")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


async def while_there(receive: Any, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of some work, which is broken off when the client goes. Then raises `Gone`.

    The request's body must have been read.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
