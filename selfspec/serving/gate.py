"""Who may ask: the names by which the server is called, the pages that call it, and the key.

Stands in front of everything else, and reads headers only.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from selfspec.serving.refusal import Refused

_OPEN_PATHS = ("/health",)  # Without a key: whoever looks after the server asks for it.


class Gate:
    """An ASGI application that lets requests through to another one.

    A page of another site can make a browser send requests here. Such a request names the page as
    its `Origin`, or this server by a name that the page's owner lets point here, as its `Host`. So
    a `Host` has to be an IP address, ``localhost``, or one of `hosts`, and an `Origin` has to be
    one of `origins`, whose pages may then read the answers.
    """

    def __init__(
        self,
        app: Any,
        *,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        api_key: str | None = None,
    ) -> None:
        if origins:
            methods = ["GET", "POST"]
            app = CORSMiddleware(app, origins, allow_methods=methods, allow_headers=["*"])
        self._app = app
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = frozenset(origin.lower() for origin in origins)
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Refuses a request or lets it through."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            try:
                self._check(scope)
            except Refused as error:
                await JSONResponse(error.as_json(), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Any) -> None:
        headers = _headers(scope)
        self._check_host(headers.get(b"host", []))
        for origin in headers.get(b"origin", []):
            if origin.decode("latin-1").lower() not in self._origins:
                raise Refused(
                    f"Origin must be one that --allow-origin names (got {_shown(origin)})",
                    status=403,
                    code="origin_not_allowed",
                )
        # A browser asks without the key whether it may ask with it; that reaches no route.
        if scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            self._check_key(headers.get(b"authorization", []))

    def _check_host(self, given: Sequence[bytes]) -> None:
        name = _without_port(given[0].decode("latin-1")).lower() if len(given) == 1 else ""
        if name not in self._hosts and not _is_address(name):
            got = _shown(b", ".join(given))
            raise Refused(
                "Host must be localhost, an IP address, or one that --allow-host names "
                f"(got {got})",
                status=403,
                code="host_not_allowed",
            )

    def _check_key(self, given: Sequence[bytes]) -> None:
        if self._key is None:
            return
        kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        is_right = hmac.compare_digest(key.strip(), self._key)
        if not is_right or kind.lower() != b"bearer":
            raise Refused(
                "Authorization must be 'Bearer' and the server's API key",
                status=401,
                code="invalid_api_key",
            )


def _headers(scope: Any) -> dict[bytes, list[bytes]]:
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.lower(), []).append(value)
    return headers


def _without_port(host: str) -> str:
    """The name in a `Host` header.

    >>> _without_port("localhost:8000"), _without_port("[::1]:8000"), _without_port("[::1]")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(header: bytes) -> str:
    return repr(header.decode("latin-1"))[:80]
