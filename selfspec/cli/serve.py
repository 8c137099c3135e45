"""`selfspec serve`: one model over HTTP, with OpenAI's protocol, for many clients at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt
from cyclopts.validators import Number

from selfspec.cli.loading import Loaded, check_options
from selfspec.cli.messages import say, working
from selfspec.cli.options import DraftOptions, Knobs, Model
from selfspec.errors import CliError
from selfspec.machine.memory import amount_in_bytes

if TYPE_CHECKING:
    from selfspec import SpecConfig
    from selfspec.serving.model_thread import ModelThread

_LOCAL = ("localhost", "127.0.0.1", "::1")  # Hosts that let no other machine in.
_WILDCARDS = ("0.0.0.0", "::", "")  # Each means all addresses of this machine.
_LEAST_TOKENS = 64  # Each text must have room for the KV of 64 tokens.

_Port = Annotated[int, Parameter(validator=Number(gte=1, lte=65535))]
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
    max_rows: PositiveInt = 16
    """Texts written at the same time."""
    max_waiting: NonNegativeInt = 256
    """Texts that may wait; then 503."""
    max_kv_memory: str | None = None
    """For keys and values, such as 4GB. Default: what --max-memory leaves, or half of what is
    free."""

    @property
    def hosts(self) -> set[str]:
        return {self.host, *self.allow_host} - set(_WILDCARDS)

    @property
    def kv_bytes(self) -> int | None:
        if self.max_kv_memory is None:
            return None
        return amount_in_bytes(self.max_kv_memory, name="--max-kv-memory")

    def check(self) -> None:
        _ = self.kv_bytes
        if self.api_key is not None and not self.api_key.strip():
            raise CliError(
                "--api-key must not be empty (got no characters); leave it out for no key"
            )
        _check_port(self.host, self.port)

    def memory_of_texts(self, bytes_per_token: int, default: int) -> int:
        """What keys and values may take. A text has one of `max_rows` + 1 shares."""
        memory = self.kv_bytes or default
        least = _LEAST_TOKENS * (self.max_rows + 1) * bytes_per_token
        if memory < least:
            half = "half of what is free, " if self.kv_bytes is None else ""
            raise CliError(
                f"--max-kv-memory must be at least {least} for this model, so that {self.max_rows} "
                f"texts have room for {_LEAST_TOKENS} tokens each (got {half}{memory} bytes); "
                "raise it, make memory free, or lower --max-rows"
            )
        return memory

    def notes(self, num_bytes: int) -> Iterator[str]:
        """What the user who starts the server should know. A weight has `num_bytes`."""
        if num_bytes < 4:
            yield (
                "note: in half precision one seed may give two texts, since near-ties depend on "
                "what else is being answered; --dtype float32 gives one"
            )
        if self.host not in _LOCAL:
            who = (
                "everyone who reaches this port can use the model and read the statistics; set "
                "SELFSPEC_API_KEY"
                if self.api_key is None
                else "the key and all texts travel unencrypted; put a proxy with TLS in front"
            )
            yield f"warning: --host {self.host} lets other machines in, and {who}"


def serve(
    model: Model,
    /,
    *,
    name: str | None = None,
    listening: Listening = Listening(),
    options: DraftOptions = DraftOptions(),
    knobs: Knobs = Knobs(),
) -> None:
    """Serve a model over HTTP, with OpenAI's protocol, to many clients at once.

    Args:
        name: The model's name in requests. Default: MODEL.
    """
    options, config = replace(options, model=model), knobs.config()
    check_options(options)
    listening.check()
    if any(find_spec(package) is None for package in ("fastapi", "uvicorn")):
        raise CliError("serving needs more packages: pip install fastapi uvicorn")
    with working(f"Loading {options.title}"):
        # In a thread that ends: the OpenMP threads of one that stays would slow down answers.
        with ThreadPoolExecutor(1) as thread:
            answering, loaded = thread.submit(_model_thread, options, listening, config).result()
        answering.start()
    from selfspec.serving.app import application
    from selfspec.serving.app import serve as listen

    name = options.title if name is None else name
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    where = f"http://{host}:{listening.port}"
    say(f"{name} answers at {where}/v1, statistics: {where}/selfspec/stats")
    say(kept_kv_line(config, answering.max_memory))
    for line in listening.notes(answering.model.dtype.itemsize):
        say(line)
    app = application(
        answering,
        name=name,
        encoder=loaded.encoder(),
        hosts=listening.hosts,
        origins=listening.allow_origin,
        api_key=listening.api_key,
    )
    listen(app, answering, host=listening.host, port=listening.port, access_log=options.verbose)


def kept_kv_line(config: SpecConfig, max_bytes: int | None) -> str:
    """What becomes of what was read for a text."""
    if config.kept_kv == 0:
        return "every prompt is read from its first token (--kept-kv 0)"
    most = f"{(max_bytes or 0) / 1e9:.1f} GB" if config.kept_kv is None else config.kept_kv
    whose = "one request" if config.learning == "request" else "all clients"
    return (
        f"what prompts of {whose} begin with alike is read once, and kept afterwards in what "
        f"running texts leave of {most}"
    )


def _model_thread(
    options: DraftOptions, listening: Listening, config: SpecConfig
) -> tuple[ModelThread, Loaded]:
    from selfspec.machine.memory import free_memory
    from selfspec.serving.model_thread import ModelThread
    from selfspec.weights.streamed.memory_plan import kv_bytes

    max_rows = listening.max_rows
    loaded = Loaded.load(options, num_texts=max_rows, sees=True, packs=config.may_pack)
    model, left = loaded.model, loaded.memory_of_texts(max_rows)
    half = free_memory(model.device) // 2
    thread = ModelThread(
        model,
        loaded.tokenizer,
        loaded.new_spec(config),
        max_rows=max_rows,
        max_memory=listening.memory_of_texts(kv_bytes(model, 1), left or half),
        max_waiting=listening.max_waiting,
    )
    return thread, loaded


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
