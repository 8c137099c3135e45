"""The routes of the server, its answers and error messages, and the loop that listens."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from socket import socket
from time import perf_counter
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from selfspec.serving.exchange import Exchange
from selfspec.serving.fields import RequestError, checked, json_object
from selfspec.serving.images import MAX_IMAGE_BYTES
from selfspec.serving.limits import GONE, ByteBudget, Gate, body_of, in_thread, while_there
from selfspec.serving.meters import Meters
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.replies import Form, error_body
from selfspec.serving.response_form import ResponseForm, new_form
from selfspec.serving.responses import Responses
from selfspec.serving.schema import Chat, Completion, TextRequest, Tokens
from selfspec.serving.translator import PromptTranslator, ids_of

# A body may have 1 MiB, or 16 bytes for each position of the model if that is more.
_LEAST_BODY = 1 << 20
_BYTES_A_POSITION = 16
_PATIENCE = 5  # At the end running answers get 5 seconds, and then error messages 5 more.
_MAX_CONNECTIONS = 1024

_TEXTS: dict[str, type[TextRequest]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
}


class _Server(uvicorn.Server):  # type: ignore[misc]
    """Breaks off at the end what still runs after 5 seconds, since uvicorn waits for it."""

    def __init__(self, config: uvicorn.Config, model: ModelThread) -> None:
        super().__init__(config)
        self._model = model

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Breaks off at a second signal what runs. After one more, uvicorn leaves tracebacks."""
        if self.should_exit and not self._model.is_stopping:
            self._model.break_off()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_PATIENCE, self._model.break_off)
        await super().shutdown(sockets)


def serve(
    app: FastAPI, model: ModelThread, *, host: str, port: int, access_log: bool = False
) -> None:
    """Answers until a signal comes. After a SIGTERM it returns; Ctrl-C interrupts."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=2 * _PATIENCE,
    )
    # uvicorn raises its signals once more at the end. A SIGTERM would then end the process before
    # it saves what was learned.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _Server(config, model).run()
    finally:
        signal.signal(signal.SIGTERM, before)


def application(
    model: ModelThread,
    *,
    name: str,
    translator: PromptTranslator,
    hosts: Iterable[str] = (),
    origins: Sequence[str] = (),
    api_key: str | None = None,
) -> FastAPI:
    """An application that answers by OpenAI's protocol. When it ends, it ends the model's thread.

    `hosts`, `origins` and `api_key` say who may ask; see `Gate`.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            model.join(_PATIENCE)

    app = FastAPI(openapi_url=None, redirect_slashes=False, lifespan=lifespan)
    routes = _Routes(model, name, translator)
    for path, request_type in _TEXTS.items():
        app.router.routes.append(Route(path, _Answers(routes, request_type), methods=["POST"]))
    app.add_api_route("/v1/models", routes.models)
    app.add_api_route("/v1/models/{name:path}", routes.model)
    app.add_api_route("/tokenize", routes.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", routes.detokenize, methods=["POST"])
    app.add_api_route("/health", routes.health, methods=["GET", "HEAD"])
    app.add_api_route("/version", lambda: {"version": version("selfspec")})
    app.add_api_route("/metrics", routes.metrics)
    app.add_api_route("/selfspec/stats", routes.stats)
    for error_type in (HTTPException, RequestError, Exception):
        app.add_exception_handler(error_type, _error_response)
    if origins:
        methods = ["GET", "POST"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"]
        )
    app.add_middleware(Gate, hosts=hosts, origins=origins, api_key=api_key)
    return app


class _Routes:
    def __init__(self, model: ModelThread, name: str, translator: PromptTranslator) -> None:
        self._model = model
        self._name = name
        self._translator = translator
        self.meters = Meters(model)
        self._budget = ByteBudget()
        self._turn = asyncio.Lock()
        self._max_body = max(_LEAST_BODY, _BYTES_A_POSITION * (translator.max_positions or 0))
        if translator.images.processor is not None:
            self._max_body += MAX_IMAGE_BYTES // 3 * 4  # in base64

    async def tokenize(self, request: Request) -> Any:
        """As vLLM's `/tokenize`: the body is that of a chat or of a completion."""
        with ExitStack() as until_over:
            body, _ = await self._read(request, until_over)
            fields = checked(Chat if "messages" in body else Completion, body)
            if len(fields.prompts) != 1:
                raise RequestError("prompt must be one text, or the ids of one", field="prompt")
            encoded = partial(self._translator.encoded, fields.prompts[0], fields)
            ids = ids_of(await in_thread(self._turn, encoded))
        return {"count": len(ids), "max_model_len": self._translator.max_positions, "tokens": ids}

    async def detokenize(self, request: Request) -> Any:
        with ExitStack() as until_over:
            body, _ = await self._read(request, until_over)
            ids = checked(Tokens, body).tokens
            self._translator.check_ids("tokens", ids)
            decoded = partial(self._translator.tokenizer.decode, ids)
            return {"prompt": await in_thread(self._turn, decoded)}

    async def models(self) -> Any:
        return {"object": "list", "data": [await self.model(self._name)]}

    async def model(self, name: str) -> Any:
        self._check_model(name)
        return {"id": name, "object": "model", "created": 0, "owned_by": "selfspec"}

    async def health(self) -> Response:
        stopping = self._model.is_stopping
        return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    async def metrics(self) -> Response:
        return Response(self.meters.as_text(), media_type="text/plain; version=0.0.4")

    async def stats(self) -> Any:
        return {**self._model.spec.total_stats.as_dict(), "server": self.meters.numbers()}

    async def answer(
        self, request: Request, request_type: type[TextRequest], until_over: ExitStack
    ) -> Response:
        arrived = perf_counter()
        body, hold = await self._read(request, until_over)
        fields = checked(request_type, body)
        self._check_model(fields.model)
        form = new_form(self._name, fields, body)
        exchange, streams = Exchange(self._model, fields, hold), fields.stream
        until_over.callback(exchange.close)
        # Calls are prepared one request at a time.
        prepare = partial(exchange.prepare, fields, self._translator)
        prepared = in_thread(self._turn, prepare)
        del body, fields, prepare  # Their images may be large.
        await while_there(request, prepared)
        if streams:
            events, headers = self._events(form, exchange, arrived), {"cache-control": "no-cache"}
            return StreamingResponse(events, headers=headers, media_type="text/event-stream")
        pieces = await while_there(request, exchange.whole())
        return JSONResponse(form.whole(pieces, self._usage(exchange, arrived)))

    async def _read(
        self, request: Request, until_over: ExitStack
    ) -> tuple[dict[str, Any], Callable[[int], object]]:
        """The body of a request, and what counts the bytes that it has until all is over."""
        hold = partial(self._budget.hold, object())
        until_over.callback(hold, 0)
        return json_object(await body_of(request, self._max_body, hold), "the body"), hold

    async def _events(
        self, form: Form | ResponseForm, exchange: Exchange, arrived: float
    ) -> AsyncIterator[bytes]:
        try:
            async for piece in exchange.pieces():
                yield form.chunk(piece)
            yield form.end(self._usage(exchange, arrived))
        except RequestError as error:
            yield form.failed(error)
        except (asyncio.CancelledError, GeneratorExit):
            self.meters.counts["requests_cancelled_total"] += 1
            raise

    def _usage(self, exchange: Exchange, arrived: float) -> dict[str, Any]:
        usage = exchange.usage()
        self.meters.count(usage, (exchange.first_at or arrived) - arrived)
        return usage

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._name:
            rule = f"model must be {self._name!r}, the one that this server answers with"
            got, code = f"(got {name!r:.80})", "model_not_found"
            raise RequestError(f"{rule} {got}", field="model", status=404, code=code)


class _Answers:
    """The application that answers one kind of requests, and counts them by their status.

    What a request has is given up once its answer was sent, or came to another end.
    """

    def __init__(self, routes: _Routes, request_type: type[TextRequest]) -> None:
        self._routes = routes
        self._request_type = request_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, status, meters = Request(scope, receive), 500, self._routes.meters
        with ExitStack() as until_over:
            try:
                response = await self._routes.answer(request, self._request_type, until_over)
                status = response.status_code
            except RequestError as error:
                status = error.status
                raise
            finally:
                meters.requests[request.url.path, status] += 1
                meters.counts["requests_cancelled_total"] += status == GONE
            await response(scope, receive, send)


async def _error_response(request: Request, error: Exception) -> Response:
    headers = None
    if isinstance(error, HTTPException):
        rule, headers = f"no such route: {request.method} {request.url.path[:80]}", error.headers
        error = RequestError(rule, status=error.status_code, code="no_such_route")
    elif not isinstance(error, RequestError):
        error = RequestError.of(error)
    if error.status == 503:
        headers = {"retry-after": "1"}
    return JSONResponse(error_body(error), error.status, headers)
