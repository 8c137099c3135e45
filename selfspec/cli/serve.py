"""`selfspec serve`: one model behind HTTP, by the protocol of OpenAI, for many clients at once."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt
from cyclopts.validators import Number

from selfspec.cli.shared.messages import say, working
from selfspec.cli.shared.options import DraftOptions, Knobs, Model
from selfspec.cli.shared.writer import checked, memory_of_texts, opened
from selfspec.errors import CliError
from selfspec.machine.memory import amount_in_bytes

if TYPE_CHECKING:
    from selfspec import SpecConfig
    from selfspec.serving.model_thread import ModelThread

_WILDCARDS = ("0.0.0.0", "::", "")  # Addresses that mean all of this machine's.
_LEAST_TOKENS = 64  # Of them a text must have room among the keys and values.

_Port = Annotated[int, Parameter(validator=Number(gte=1, lte=65535))]
_Names = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]
_Key = Annotated[str | None, Parameter(env_var="SELFSPEC_API_KEY")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the server listens, and whom it answers."""

    host: str = "localhost"
    """The address to listen at. 0.0.0.0: reachable from other machines."""
    port: _Port = 8000
    """The port to listen at."""
    api_key: _Key = None
    """Answer only requests with this key. The environment hides it from other users."""
    allow_host: _Names = ()
    """A host name that requests may use; can be given several times."""
    allow_origin: _Names = ()
    """A web site whose pages may send requests, such as https://chat.example.org."""

    @property
    def is_wide(self) -> bool:
        """Can other machines reach the server?"""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    @property
    def hosts(self) -> list[str]:
        """The names by which the server may be called."""
        own = [] if self.host in _WILDCARDS else [self.host]
        return [*own, *self.allow_host]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Load:
    """How many texts are written, and what they may take."""

    max_rows: PositiveInt = 16
    """The most texts that are written at the same time; others wait."""
    max_waiting: NonNegativeInt = 256
    """The most texts that wait; further ones are refused with 503."""
    max_kv_memory: str | None = None
    """Memory for the keys and values of all texts, such as 4GB. Default: half of what is free, or
    what --max-memory leaves."""

    @property
    def kv_bytes(self) -> int | None:
        """What keys and values may take; None: it depends on what is free."""
        if self.max_kv_memory is None:
            return None
        return amount_in_bytes(self.max_kv_memory, name="--max-kv-memory")

    def check(self, bytes_per_token: int) -> None:
        """Refuses a memory in which texts have no room. A text has one of `max_rows` + 1 shares."""
        least = _LEAST_TOKENS * (self.max_rows + 1) * bytes_per_token
        if self.kv_bytes is not None and self.kv_bytes < least:
            raise CliError(
                f"--max-kv-memory must be at least {least} for this model, so that {self.max_rows} "
                f"texts have room for {_LEAST_TOKENS} tokens each (got {self.max_kv_memory!r}); "
                "raise it, or lower --max-rows"
            )


def serve(
    model: Model,
    /,
    *,
    name: str | None = None,
    access: Access = Access(),
    load: Load = Load(),
    asked: DraftOptions = DraftOptions(),
    knobs: Knobs = Knobs(),
) -> None:
    """Serve a model over HTTP, with OpenAI's protocol, to many clients at once.

    Args:
        name: The name of the model in requests. Default: MODEL as given.
    """
    asked = replace(asked, model=model)
    config = checked(asked, knobs.config())
    _check_access(access)
    _ = load.kv_bytes  # Refuses what is no amount before anything is loaded.
    _check_extra()
    with working(f"Loading {asked.title}"):
        # In a thread that ends: its threads of OpenMP would stay beside those of the answers.
        with ThreadPoolExecutor(1) as thread:
            answering = thread.submit(_model_thread, asked, load, config).result()
        answering.start()
    from selfspec.serving.app import serve as listen

    name = asked.title if name is None else name
    host = f"[{access.host}]" if ":" in access.host else access.host
    where = f"http://{host}:{access.port}"
    say(f"{name} answers at {where}/v1, statistics: {where}/selfspec/stats")
    for line in _notes(access, answering.model.dtype.itemsize):
        say(line)
    app = _application(answering, name, access)
    listen(app, host=access.host, port=access.port, access_log=asked.verbose)


def _model_thread(asked: DraftOptions, load: Load, config: SpecConfig) -> ModelThread:
    """Loads everything; nothing is answered yet."""
    from selfspec.machine.memory import free_memory
    from selfspec.run.rows_backend import kv_bytes_per_token
    from selfspec.serving.model_thread import ModelThread

    loaded, start = opened(asked, num_texts=load.max_rows)
    model = loaded.model
    load.check(kv_bytes_per_token(model))
    left = memory_of_texts(model, start.draft_model, asked.max_memory, load.max_rows)
    return ModelThread(
        model,
        loaded.tokenizer,
        start.new_spec(config, loaded.tokenizer),
        max_rows=load.max_rows,
        max_memory=load.kv_bytes or left or free_memory(model.device) // 2,
        max_waiting=load.max_waiting,
    )


def _application(model: ModelThread, name: str, access: Access) -> Any:
    from selfspec.building.limits import max_positions, vocab_size
    from selfspec.serving.app import application
    from selfspec.serving.calls import Limits

    return application(
        model,
        name=name,
        limits=Limits(vocab_size(model.model), max_positions(model.model)),
        hosts=access.hosts,
        origins=list(access.allow_origin),
        api_key=access.api_key,
    )


def _notes(access: Access, num_bytes: int) -> Iterator[str]:
    """What whoever starts the server should know."""
    if num_bytes < 4:
        yield (
            "note: in half precision one seed may give two texts, since near-ties depend on what "
            "else is being answered; --dtype float32 gives one"
        )
    if access.is_wide:
        yield _warning(access)


def _warning(access: Access) -> str:
    who = (
        "whoever reaches this port can use the model and read the statistics; set SELFSPEC_API_KEY"
        if access.api_key is None
        else "the key and all texts travel unencrypted; put a proxy with TLS in front"
    )
    return f"warning: --host {access.host} lets other machines in, and {who}"


def _check_extra() -> None:
    if any(find_spec(name) is None for name in ("fastapi", "prometheus_client", "uvicorn")):
        raise CliError("serving needs more packages: pip install fastapi prometheus-client uvicorn")


def _check_access(access: Access) -> None:
    if access.api_key is not None and not access.api_key.strip():
        raise CliError("--api-key must not be empty (got no characters); leave it out for no key")
    for origin in access.allow_origin:
        if "://" not in origin or origin.rstrip("/") != origin:
            raise CliError(
                "--allow-origin must be a scheme and a host, such as https://chat.example.org "
                f"(got {origin!r})"
            )
    _check_port(access.host, access.port)


def _check_port(host: str, port: int) -> None:
    """Refuses an address that is taken, before the model is read."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CliError(
            f"--host must be an address of this machine (got {host!r}: {error})"
        ) from error
    for family, kind, protocol, _name, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise CliError(
                f"--port must be free at {host} (got {port}: {error.strerror}); name another one, "
                "or stop what listens there"
            ) from error
