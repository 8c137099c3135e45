"""Who may ask: the names by which the server is called, the pages that call it, and the key."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers
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
