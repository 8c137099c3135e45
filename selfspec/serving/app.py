"""The routes: what is asked, what is answered, and what a client is told that goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from selfspec.errors import SelfSpecError
from selfspec.serving.answering import Answering
from selfspec.serving.asked import Rules
from selfspec.serving.body import Gone, read_json, while_there
from selfspec.serving.exchange import Exchange, Exchanges, Piece
from selfspec.serving.meters import Meters
from selfspec.serving.protocol import CHAT, COMPLETION, DONE, Form, Kind, event
from selfspec.serving.refusal import Refused

_LEAST_BODY = 1 << 20  # Every body may have this length,
_BYTES_A_POSITION = 16  # or this for each position of the model, if that is more.
_GONE = 499  # As nginx counts requests whose client had gone.


def application(answering: Answering, rules: Rules) -> FastAPI:
    """An application that answers by OpenAI's protocol, without a gate in front of it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = _Routes(answering, rules)
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"])
    app.add_api_route("/v1/completions", routes.complete, methods=["POST"])
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", routes.model, methods=["GET"])
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/metrics", routes.metrics, methods=["GET"])
    app.add_api_route("/selfspec/stats", routes.stats, methods=["GET"])
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _failed)
    return app


class _Routes:
    def __init__(self, answering: Answering, rules: Rules) -> None:
        self._answering = answering
        self._rules = rules
        self._exchanges = Exchanges(answering, rules)
        self._meters = Meters(answering)
        self._max_body = max(_LEAST_BODY, _BYTES_A_POSITION * (rules.max_positions or 0))

    async def chat(self, request: Request) -> Response:
        """Answers a conversation."""
        return await self._counted(request, CHAT)

    async def complete(self, request: Request) -> Response:
        """Continues a text."""
        return await self._counted(request, COMPLETION)

    async def models(self) -> Response:
        """The one model that answers."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """The same, by its name."""
        if name != self._rules.model:
            raise Refused(f"no model {name!r:.80} is here", status=404, code="model_not_found")
        return JSONResponse(self._model())

    async def health(self) -> Response:
        """Whether requests are taken."""
        stopping = self._answering.is_stopping
        return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    async def metrics(self) -> Response:
        """The numbers in Prometheus' text form."""
        return Response(self._meters.as_text(), media_type="text/plain; version=0.0.4")

    async def stats(self) -> Response:
        """What was counted over all answers that ended so far, and the server's own numbers."""
        drafting = self._answering.spec.total_stats.as_dict()
        return JSONResponse({**drafting, "server": self._meters.as_dict()})

    def _model(self) -> dict[str, Any]:
        return {"id": self._rules.model, "object": "model", "created": 0, "owned_by": "selfspec"}

    async def _counted(self, request: Request, kind: Kind) -> Response:
        route, status = request.url.path, 500
        try:
            response = await self._answer(request, kind)
            status = response.status_code
        except Refused as error:
            status = error.status
            raise
        except Gone:
            self._meters.cancelled()
            status = _GONE
            response = Response(status_code=_GONE)
        finally:
            self._meters.request(route, status)
        return response

    async def _answer(self, request: Request, kind: Kind) -> Response:
        arrived = perf_counter()
        self._answering.check_open()
        asked = kind.read(await read_json(request, self._max_body), self._rules)
        exchange = await while_there(request.receive, self._exchanges.open(asked))
        form = Form(kind, self._rules.model)
        if asked.streams:
            return _Stream(form, exchange, self._meters, arrived)
        try:
            choices = await while_there(request.receive, _all(exchange))
        finally:
            exchange.cancel()
        self._meters.first_token((exchange.first_token or perf_counter()) - arrived)
        self._meters.answered(exchange.usage.num_prompt_tokens, exchange.usage.num_new_tokens)
        return JSONResponse(form.whole(choices, exchange.usage))


class _Stream(Response):  # type: ignore[misc]
    """Events as the text comes; the texts are forgotten when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, form: Form, exchange: Exchange, meters: Meters, arrived: float) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._form = form
        self._exchange = exchange
        self._meters = meters
        self._arrived = arrived

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends everything, for as long as the client is there."""
        try:
            await while_there(receive, self._send(send))
        except Gone:
            self._meters.cancelled()
        finally:
            self._exchange.cancel()

    async def _send(self, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            data = event(_as_refused(error).as_json())
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        form, exchange = self._form, self._exchange
        for chunk in form.openings(exchange.num_choices):
            yield event(chunk)
        has_first = False
        async for piece in exchange.pieces():
            if not has_first and exchange.first_token is not None:
                self._meters.first_token(exchange.first_token - self._arrived)
                has_first = True
            for chunk in form.chunks(piece):
                yield event(chunk)
        self._meters.answered(exchange.usage.num_prompt_tokens, exchange.usage.num_new_tokens)
        if exchange.asked.tells_usage:
            yield event(form.usage_chunk(exchange.usage))
        yield DONE


async def _all(exchange: Exchange) -> list[Piece]:
    """The whole text of each choice, with the reason why it ended."""
    texts = [""] * exchange.num_choices
    reasons: list[str | None] = [None] * exchange.num_choices
    try:
        async for piece in exchange.pieces():
            texts[piece.choice] += piece.text
            reasons[piece.choice] = piece.finish_reason or reasons[piece.choice]
    except asyncio.CancelledError:
        raise
    except Exception as error:
        raise _as_refused(error) from error
    return [Piece(n, *each) for n, each in enumerate(zip(texts, reasons, strict=True))]


def _as_refused(error: Exception) -> Refused:
    """What a client is told: the reason, unless it is a fault of ours."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, SelfSpecError):
        return Refused(str(error))
    return Refused("the answer broke off by a fault of the server; its log says more", status=500)


async def _refused(_request: Request, error: Any) -> Response:
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(error.as_json(), error.status, headers)


async def _failed(_request: Request, error: Any) -> Response:
    """A fault of ours, which uvicorn logs."""
    return JSONResponse(_as_refused(error).as_json(), 500)


async def _no_route(request: Request, error: Any) -> Response:
    rule = f"no such route: {request.method} {request.url.path[:80]}"
    refused = Refused(rule, status=error.status_code, code="no_such_route")
    return JSONResponse(refused.as_json(), error.status_code, getattr(error, "headers", None))
