"""Who may ask: the names by which the server is called, the pages that call it, and the key."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from selfspec.serving.fields import RequestError
from selfspec.serving.replies import error_body

# A name or an address, the one with colons in brackets, and perhaps a port.
_HOST = re.compile(r"(?:\[(.*)\]|([^:]*))(?::\d*)?")


class Gate:
    """Wraps an ASGI application, and reads headers only.

    A page of another site can make a browser send requests here. Such a request names the page as
    its `Origin`, or this server by a name that the page's owner lets point here, as its `Host`. So
    a `Host` has to be an IP address, ``localhost``, or one of `hosts`, and an `Origin` has to be
    one of `origins`. (Starlette's own middlewares know no rule for addresses, and let requests of
    other pages through; only the answers are kept from these pages.)
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._app = app
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rule = self._broken_rule(Headers(scope=scope)) if scope["type"] == "http" else None
        if rule is None:
            path = scope.get("path", "").rstrip("/") or "/"  # A slash at the end means nothing.
            await self._app({**scope, "path": path}, receive, send)
        else:
            refused = error_body(RequestError(rule, status=403))
            await JSONResponse(refused, 403)(scope, receive, send)

    def _broken_rule(self, headers: Headers) -> str | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            rule = "Host must be localhost, an IP address, or one that --allow-host names"
            return f"{rule} (got {', '.join(hosts)!r:.80})"
        if not {origin.lower() for origin in origins} <= self._origins:
            return f"Origin must be one that --allow-origin names (got {', '.join(origins)!r:.80})"
        return None

    def _is_ours(self, host: str) -> bool:
        parts = _HOST.fullmatch(host)
        name = parts[parts.lastindex].lower() if parts and parts.lastindex else ""
        try:
            return name in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def key_check(api_key: str) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """A dependency of routes that refuses requests without the key."""

    async def check(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.encode("latin-1"), api_key.encode())
        if scheme.lower() != "bearer" or not is_right:  # The name of a scheme has no case.
            rule = "Authorization must be 'Bearer' and the server's API key"
            raise RequestError(rule, status=401, code="invalid_api_key")

    return check
