"""`selfspec serve`: one model over HTTP, with OpenAI's protocol, for many clients at once."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from selfspec.cli.loading import check_options
from selfspec.cli.messages import say
from selfspec.cli.options import (
    Knobs,
    LearnOptions,
    Model,
    NotNegative,
    Positive,
    WriteOptions,
    whole_number,
)
from selfspec.cli.writer import Writer, load_writer
from selfspec.errors import CliError
from selfspec.machine.memory import amount_in_bytes

if TYPE_CHECKING:
    from selfspec import SpecConfig
    from selfspec.serving.model_thread import ModelThread

_LOCAL = ("localhost", "127.0.0.1", "::1")  # Hosts that let no other machine in.
_WILDCARDS = ("0.0.0.0", "::", "")  # Each means all addresses of this machine.

_Port = Annotated[int, whole_number(1, below=1 << 16)]
_Names = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]
_Key = Annotated[str | None, Parameter(env_var="SELFSPEC_API_KEY")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where the server listens, whom it answers, and how many at a time."""

    host: str = "localhost"
    """The address to listen at; 0.0.0.0: also for other machines."""
    port: _Port = 8000
    """The port to listen at."""
    api_key: _Key = None
    """Needed in requests."""
    allow_host: _Names = ()
    """Another name for this machine in requests."""
    allow_origin: _Names = ()
    """A web site whose pages may send requests."""
    max_rows: Positive = 16
    """Texts written at the same time."""
    max_waiting: NotNegative = 256
    """Texts that may wait; then 503."""
    max_kv_memory: str | None = None
    """For keys and values, such as 4GB. Default: what --max-memory leaves, or half of what is
    free."""

    @property
    def hosts(self) -> set[str]:
        return {self.host, *self.allow_host} - set(_WILDCARDS)

    @property
    def kv_bytes(self) -> int | None:
        amount = self.max_kv_memory
        return None if amount is None else amount_in_bytes(amount, name="--max-kv-memory")

    def check(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise CliError(
                "--api-key must not be empty (got no characters); leave it out for no key"
            )
        _ = self.kv_bytes  # Refuses what is no amount.
        _check_port(self.host, self.port)

    @property
    def warning(self) -> str | None:
        """A warning for the user who starts the server, if one is due."""
        if self.host in _LOCAL:
            return None
        who = "the key and all texts travel unencrypted; put a proxy with TLS in front"
        if self.api_key is None:
            who = (
                "everyone who reaches this port can use the model and read the statistics; set "
                "SELFSPEC_API_KEY"
            )
        return f"warning: --host {self.host} lets other machines in, and {who}"


def serve(
    model: Model,
    /,
    *,
    name: str | None = None,
    listening: Listening = Listening(),
    options: LearnOptions = LearnOptions(),
    knobs: Knobs = Knobs(),
) -> None:
    """Serve a model over HTTP, with OpenAI's protocol, to many clients at once.

    Args:
        name: The model's name in requests. Default: MODEL.
    """
    options, config = replace(options, model=model), knobs.config()
    check_options(options)
    listening.check()
    if name is not None and not name.strip():
        raise CliError(f"--name must not be empty (got {name!r}); leave it out to use MODEL")
    if any(find_spec(package) is None for package in ("fastapi", "uvicorn")):
        raise CliError("serving needs more packages: pip install fastapi uvicorn")
    # In a thread that ends: the OpenMP threads of one that stays would slow down answers.
    with ThreadPoolExecutor(1) as thread:
        answering, writer = thread.submit(_model_thread, options, listening, config).result()
    answering.start()
    from selfspec.serving.app import application
    from selfspec.serving.app import serve as listen

    name = options.title if name is None else name
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    where = f"http://{host}:{listening.port}"
    say(f"{name} answers at {where}/v1, statistics: {where}/selfspec/stats")
    if warning := listening.warning:
        say(warning)
    app = application(
        answering,
        name=name,
        translator=replace(writer.translator(), default={}, length_option="max_tokens"),
        hosts=listening.hosts,
        origins=listening.allow_origin,
        api_key=listening.api_key,
    )
    listen(app, answering, host=listening.host, port=listening.port, access_log=options.verbose)


def _model_thread(
    options: LearnOptions, listening: Listening, config: SpecConfig
) -> tuple[ModelThread, Writer]:
    from selfspec.machine.memory import free_memory
    from selfspec.serving.model_thread import ModelThread

    max_rows = listening.max_rows
    loading = WriteOptions(**vars(options))  # Requests say what is written.
    writer = load_writer(loading, num_texts=max_rows, sees=True, packs=config.forward != "eager")
    memory = listening.kv_bytes or writer.memory_of_texts(max_rows)
    thread = ModelThread(
        writer.model,
        writer.tokenizer,
        writer.new_spec(config),
        max_rows=max_rows,
        max_memory=memory or free_memory(writer.model.device) // 2,
        max_waiting=listening.max_waiting,
    )
    return thread, writer


def _check_port(host: str, port: int) -> None:
    try:
        for *family, _name, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(*family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise CliError(
            f"--host and --port must be an address of this machine that is free (got {host!r} and "
            f"{port}: {error.strerror}); name another one, or stop what listens there"
        ) from error
