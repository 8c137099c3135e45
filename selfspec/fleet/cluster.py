"""Reaches Ray, or starts one on this machine, and divides its cores and GPUs among workers."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import count
from typing import Any, NamedTuple

from selfspec.errors import FleetError

_log = logging.getLogger("selfspec")

LOCAL, AUTO = "local", "auto"
# Ray reads this once, when it is imported. On Linux it would otherwise listen at all addresses of
# the machine, also for itself alone; on macOS and Windows this is what it does anyway.
_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
_PATIENCE = 3.0  # In seconds, for an address at which perhaps nothing listens.

# How a client of HTTP/2 begins, which is below gRPC; a server answers with a frame of settings.
_FRAME, _SETTINGS = 9, b"\x04"
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0" * 5


class Share(NamedTuple):
    """What each worker has to itself."""

    num_cpus: float
    num_gpus: int


def imported(address: str | None = None) -> Any:
    """The module `ray`, which comes with an extra.

    If it is imported first for a Ray of this process alone, that one listens at loopback only.
    """
    if address == LOCAL and "ray" not in sys.modules:
        os.environ.setdefault(*_LOOPBACK)
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise FleetError("--ray needs the package ray: pip install ray") from error
    return ray


def check_address(address: str) -> None:
    """Refuses what is no address, and one at which nothing listens; Ray would try for a minute.

    Without the extra it says so.
    """
    imported(address)
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise FleetError(
            "--ray must be local, auto, or the host:port of a head node such as 10.0.0.1:6379 "
            f"(got {address!r})"
        )
    try:
        _check_listener(host, int(port))
    except (OSError, OverflowError) as error:
        raise FleetError(
            f"--ray must be the address of a Ray that runs (got {address!r}: {error}); start one "
            "with 'ray start --head', or pass --ray local"
        ) from error


def _check_listener(host: str, port: int) -> None:
    """Raises `OSError` if nothing listens there, or something that speaks no gRPC, as Ray does."""
    with socket.create_connection((host, port), timeout=_PATIENCE) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "0":
            connection.sendall(_HTTP2_HELLO)
            if connection.recv(_FRAME, socket.MSG_WAITALL)[3:4] != _SETTINGS:
                raise OSError("what listens there is no Ray")


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Inside, this process uses the Ray at an address, or a new one of its own.

    Its processes end with the context, and with this process however that ends. If the process
    uses a Ray already, ``"local"`` means that one, which is left as it is.
    """
    ray = imported(address)
    if address == LOCAL and ray.is_initialized():
        yield
        return
    # Whatever `log_to_driver` says, Ray prints a paragraph when a worker ends.
    with open(os.devnull, "w") as nobody, redirect_stdout(nobody):
        try:
            _connect(ray, address)
            if address == LOCAL:
                _warn_if_wide(ray)
            yield
        finally:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Nothing is sent to anybody, and what workers print stays in Ray's files."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **started)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        why = [*str(error).strip().splitlines(), type(error).__name__][0]
        hint = "; if that Ray asks for a token, set RAY_AUTH_MODE=token" * (":" in address)
        raise FleetError(f"--ray {address} can't be used: {why}{hint}") from error


def _warn_if_wide(ray: Any) -> None:
    """Says so if Ray was imported before, or is one that listens everywhere whatever we ask."""
    node = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(node).is_loopback:
        _log.warning(
            "Ray listens at all addresses of this machine (as %s), not at loopback alone; keep its "
            "ports behind a firewall",
            node,
        )


def divided(num_workers: int | None, device: str) -> tuple[int, Share]:
    """How many workers there are, and the share of each; every core has an owner if possible.

    Without a number there is a worker for each GPU, or for each machine if there is no GPU.
    """
    nodes = [node["Resources"] for node in imported().nodes() if node["Alive"]]
    num_gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if device == "cuda" and not num_gpus:
        raise FleetError("--device must be auto or cpu where Ray has no GPU (got 'cuda')")
    uses_gpus = device != "cpu" and num_gpus > 0
    number = num_workers or (num_gpus if uses_gpus else len(nodes))
    if uses_gpus and number > num_gpus:
        raise FleetError(
            f"--num-workers must be <= {num_gpus}, the number of GPUs (got {number}); start fewer, "
            "or pass --device cpu"
        )
    places = [
        (node.get("CPU", 0.0), int(node.get("GPU", 0)) if uses_gpus else number) for node in nodes
    ]
    return number, Share(cores_each(places, number), int(uses_gpus))


def cores_each(places: Sequence[tuple[float, int]], number: int) -> float:
    """The most cores that each worker can have, so that all of them fit on the machines.

    `places` are the cores of each machine, and the most workers that it can have otherwise.

    >>> cores_each([(8, 9), (8, 9)], 3), cores_each([(2, 9)], 4)
    (4.0, 0.5)
    """

    def num_fitting(cores: float) -> int:
        return sum(min(most, int(has / cores)) for has, most in places)

    largest = int(max((has for has, _ in places), default=0))
    if not largest:
        raise FleetError("--ray must have a machine with a core for workers (got none)")
    for cores in range(largest, 0, -1):
        if num_fitting(cores) >= number:
            return float(cores)
    return next(1 / parts for parts in count(2) if num_fitting(1 / parts) >= number)
