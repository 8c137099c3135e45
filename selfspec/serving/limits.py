"""Who may ask, and what one request may take from the others: bytes, time, and threads.

Knows HTTP as ASGI has it, and neither models nor fields.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from selfspec.serving.fields import RequestError
from selfspec.serving.replies import error_body

T = TypeVar("T")

GONE = 499  # nginx counts requests whose client has gone under this status.
_MOST_BYTES = 1 << 30  # What the bodies and images of all requests may take.
_FREE_BYTES = 1 << 16  # Of every body, so that texts pass while images fill the rest.
_BODY_SECONDS = 60.0  # A body must be complete by then.


# A name or an address, the one with colons in brackets, and perhaps a port.
_HOST = re.compile(r"(?:\[(.*)\]|([^:]*))(?::\d*)?")


class Gate:
    """Wraps an ASGI application, and reads headers only.

    A page of another site can make a browser send requests here. Such a request names the page as
    its `Origin`, or this server by a name that the page's owner lets point here, as its `Host`. So
    a `Host` has to be an IP address, ``localhost``, or one of `hosts`, and an `Origin` has to be
    one of `origins`. (Starlette's own middlewares know no rule for addresses, and let requests of
    other pages through; only the answers are kept from these pages.)

    With an `api_key`, all but ``/health`` needs it: monitors ask for that without a key, and
    browsers ask without it whether they may ask.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str], origins: Iterable[str], api_key: str | None
    ) -> None:
        self._app = app
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = {origin.lower() for origin in origins}
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope.get("path", "").rstrip("/") or "/"  # A slash at the end means nothing.
            scope = {**scope, "path": path}
            if refusal := self._refusal(Headers(scope=scope), scope):
                response = JSONResponse(error_body(refusal), refusal.status)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> RequestError | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            rule = "Host must be localhost, an IP address, or one that --allow-host names"
            return RequestError(f"{rule} (got {', '.join(hosts)!r:.80})", status=403)
        if not {origin.lower() for origin in origins} <= self._origins:
            got = f"(got {', '.join(origins)!r:.80})"
            return RequestError(f"Origin must be one that --allow-origin names {got}", status=403)
        needs_key = self._api_key is not None and scope["method"] != "OPTIONS"
        if needs_key and scope["path"] != "/health" and not self._has_key(headers):
            rule = "Authorization must be 'Bearer' and the server's API key"
            return RequestError(rule, status=401, code="invalid_api_key")
        return None

    def _is_ours(self, host: str) -> bool:
        parts = _HOST.fullmatch(host)
        name = parts[parts.lastindex].lower() if parts and parts.lastindex else ""
        try:
            return name in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.encode("latin-1"), (self._api_key or "").encode())
        return is_right and scheme.lower() == "bearer"  # The name of a scheme has no case.


class ByteBudget:
    """The bytes that all requests share. A request that is alone may take what it needs."""

    def __init__(self) -> None:
        self._bytes_of: dict[object, int] = {}  # By request.
        self._lock = Lock()

    def hold(self, request: object, num_bytes: int) -> None:
        """Gives a request this number of bytes, in place of those it had. Any thread may ask."""
        with self._lock:
            before = self._bytes_of.pop(request, 0)
            total = sum(self._bytes_of.values()) + num_bytes
            if self._bytes_of and num_bytes > before and total > _MOST_BYTES:
                self._bytes_of[request] = before
                rule = f"bodies and images of all requests may have {_MOST_BYTES} bytes at a time"
                raise RequestError(f"{rule}; ask again later", status=503, code="overloaded")
            if num_bytes:
                self._bytes_of[request] = num_bytes


async def body_of(request: Request, max_bytes: int, hold: Callable[[int], object]) -> bytes:
    """The body of a request, which is refused once it is too large or takes too long."""

    async def read() -> bytes:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                rule = f"the body must have at most {max_bytes} bytes (got more)"
                raise RequestError(rule, status=413)
            hold(max(len(data) - _FREE_BYTES, 0))
        return bytes(data)

    try:
        return await asyncio.wait_for(read(), _BODY_SECONDS)
    except asyncio.TimeoutError:
        rule = f"the body must be complete within {_BODY_SECONDS:.0f} seconds (got a part)"
        raise RequestError(rule, status=408) from None
    except ClientDisconnect:
        raise _gone() from None


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which ends as soon as the client has gone. Its body was read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _gone()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def in_thread(turn: asyncio.Lock, work: Callable[[], T]) -> T:
    """What some work gives, in its turn, in a thread of its own that ends with it.

    A thread that stayed would keep OpenMP threads, and more of these than cores slow down all
    answers. Who is cancelled gives the turn back when the thread has ended, and not before.
    """
    async with turn:
        executor = ThreadPoolExecutor(1, thread_name_prefix="selfspec request")
        waiting = asyncio.wrap_future(executor.submit(work))
        executor.shutdown(wait=False)
        try:
            return await asyncio.shield(waiting)
        finally:
            await asyncio.wait({waiting})
            waiting.exception()  # It is told to whoever is still there.


def _gone() -> RequestError:
    return RequestError("the client has gone", status=GONE)
