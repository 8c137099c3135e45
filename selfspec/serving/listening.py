"""Listens at an address, and ends well: running answers get a few seconds, then are broken off."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import uvicorn

from selfspec.serving.answering import Answering

_PATIENCE = 5.0  # Seconds that running answers get after a SIGTERM.
_LAST_WORDS = 5  # Seconds more in which clients are told.
_MAX_CONNECTIONS = 1024


class Listening(uvicorn.Server):  # type: ignore[misc]
    """A server that ends with exit status 0 after a SIGTERM, and like others after Ctrl-C.

    Ctrl-C breaks answers off at once.
    """

    def __init__(self, app: Any, answering: Answering, *, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_graceful_shutdown=int(_PATIENCE) + _LAST_WORDS,
            )
        )
        self._answering = answering
        self._is_hurried = False

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Answers until a signal comes; Ctrl-C raises `KeyboardInterrupt`."""
        # uvicorn raises its signals once more at the end. A SIGTERM that was obeyed is no fault.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            super().run(*args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, before)
            self._answering.join(_PATIENCE)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Notes which signal it is."""
        self._is_hurried |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        """Takes no more requests, and waits for running answers, but not for long."""
        self._answering.stop_taking()
        patience = 0.0 if self._is_hurried else _PATIENCE
        asyncio.get_running_loop().call_later(patience, self._answering.break_off)
        await super().shutdown(sockets)
