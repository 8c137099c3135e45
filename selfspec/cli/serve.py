"""`selfspec serve`: the OpenAI-compatible server of transformers, with drafts in every answer."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli.errors import CliError
from selfspec.cli.log import Verbose
from selfspec.cli.opened import checked, checked_tokenizer
from selfspec.cli.options import (
    CacheFolder,
    DeviceName,
    DraftModelName,
    DtypeName,
    Knobs,
    ModelOptions,
    RememberFolder,
    unfolds,
)
from selfspec.cli.waiting import working

if TYPE_CHECKING:
    from selfspec import SelfSpec, SpecConfig
    from selfspec.cli.server import DraftingServer

__all__ = ["serve"]


@unfolds
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder or Hub id of a language model. Requests name it in the same words.",
        ),
    ],
    knobs: Knobs,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    cache: CacheFolder = None,
    remember: RememberFolder = None,
    draft_model: DraftModelName = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at. 0.0.0.0: reachable from other machines.")
    ] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen at.")] = 8000,
    verbose: Verbose = False,
) -> None:
    """Serve a model over HTTP, by the protocol of OpenAI, with drafts in every answer."""
    from selfspec.cli.loading import source_of

    source_of(model, "MODEL")
    loading = ModelOptions(model=model, device=device, dtype=dtype)
    config = checked(loading, knobs, draft_model)
    _check_port(host, port)
    with working(f"Loading {model}"):
        _check_extra()
        spec = _spec(loading, config, cache, remember, draft_model)
        server = _server(model, spec, host=host, port=port, device=device, dtype=dtype)
    where = f"http://{host}:{port}"
    typer.echo(f"{model} answers at {where}/v1, statistics: {where}/selfspec/stats", err=True)
    # Otherwise a SIGTERM would end the process before what was learned is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server.run()


def _spec(
    loading: ModelOptions,
    config: SpecConfig,
    cache: str | None,
    remember: str | None,
    draft_model: str | None,
) -> SelfSpec:
    from selfspec.cli.loading import load_draft_model, quiet
    from selfspec.cli.writer import new_spec

    tokenizer, held = checked_tokenizer(loading, cache, remember)
    with quiet():
        small = None if draft_model is None else load_draft_model(draft_model, loading)
    return new_spec(config, tokenizer, held, remember=remember, draft_model=small)


def _server(model: str, spec: SelfSpec, **options: Any) -> DraftingServer:
    """The server with its model; nothing listens yet."""
    from selfspec.cli.loading import attempt, quiet
    from selfspec.cli.server import DraftingServer

    with quiet():
        return attempt(model, "model", lambda: DraftingServer(model, spec, **options))


def _check_extra() -> None:
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise CliError(
            "serving needs the packages fastapi, uvicorn and openai: pip install 'selfspec[serve]'"
        )


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
