"""Ports and patience for tests of servers."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

PATIENCE = 30  # seconds, before a test that waits gives up


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(done: Callable[[], Any]) -> None:
    """Returns as soon as it is done."""
    end = monotonic() + PATIENCE
    while not done():
        assert monotonic() < end, "waited in vain"
        sleep(0.01)


def is_open(port: int) -> bool:
    """Does a server answer there?"""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).close()
    except OSError:
        return False
    return True
