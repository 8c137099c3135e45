"""One request and the texts that answer it: from what is asked to pieces of text as they come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

from selfspec.batch import Answer
from selfspec.errors import SelfSpecError, one_line
from selfspec.plugin.call import Call
from selfspec.serving.calls import Limits
from selfspec.serving.model_thread import ModelThread, News
from selfspec.serving.replies import Piece, usage_of
from selfspec.serving.schema import Request, RequestError
from selfspec.serving.text import TextStream


class Exchange:
    """The texts of one request, from the first token to the last."""

    def __init__(self, model: ModelThread, request: Request, arrived: float) -> None:
        self.request = request
        self.arrived = arrived  # By `perf_counter`.
        self.num_choices = request.n * len(request.prompts)
        self.num_prompt_tokens = 0
        self.answers: list[Answer] = []  # Those that are complete.
        self.seconds_to_first: float | None = None
        self._model = model
        self._tickets: list[Call] = []
        self._news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        stops = request.stop or ()
        self._texts = [TextStream(model.tokenizer, stops) for _ in range(self.num_choices)]

    @property
    def usage(self) -> dict[str, Any]:
        """How many tokens prompts and complete answers have."""
        return usage_of(self.num_prompt_tokens, self.answers)

    async def open(self, limits: Limits, turn: asyncio.Lock) -> None:
        """Lets all texts wait for a row; refuses what can't be answered.

        Tokens are counted and calls prepared for one request after the other. That takes a thread
        that ends: one that stayed would keep threads of OpenMP, and with more of them than cores
        all wait.
        """
        self._model.check_open(self.num_choices)
        async with turn:
            pool = ThreadPoolExecutor(1, "selfspec request")
            try:
                await asyncio.get_running_loop().run_in_executor(pool, self._prepare, limits)
            finally:
                pool.shutdown(wait=False)
        self._model.check_open(self.num_choices)
        for choice, ticket in enumerate(self._tickets):
            self._model.submit(ticket, partial(self._hear, choice))

    def cancel(self) -> None:
        """Forgets the texts that are not complete."""
        for ticket in self._tickets:
            self._model.cancel(ticket.index)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes. Raises what ends the request without an answer."""
        num_left = self.num_choices
        while num_left:
            choice, news = await self._news.get()
            if isinstance(news, RequestError):
                raise news
            if isinstance(news, Answer):
                num_left -= 1
                yield self._last(choice, news)
            elif text := self._texts[choice].add(news):
                yield Piece(choice, text, None)

    async def whole(self) -> list[Piece]:
        """The whole text of each choice, with the reason why it ended."""
        texts = [Piece(choice, "", None) for choice in range(self.num_choices)]
        async for choice, text, reason in self.pieces():
            texts[choice] = Piece(choice, texts[choice].text + text, reason)
        return texts

    def _prepare(self, limits: Limits) -> None:
        request, model = self.request, self._model
        seed = secrets.randbits(62) if request.seed is None else request.seed
        try:
            for prompt in request.prompts:
                ids, arguments = limits.call(prompt, request, model.tokenizer)
                self.num_prompt_tokens += len(ids)
                for number in range(request.n):
                    self._tickets.append(model.ticket(ids, seed + number, arguments))
        except RequestError:
            raise
        except (SelfSpecError, TypeError, ValueError) as error:
            raise RequestError(one_line(error)) from error

    def _hear(self, choice: int, news: News) -> None:
        if self.seconds_to_first is None:
            self.seconds_to_first = perf_counter() - self.arrived
        self._news.put_nowait((choice, news))

    def _last(self, choice: int, answer: Answer) -> Piece:
        self.answers.append(answer)
        text = self._texts[choice]
        rest = text.end()
        return Piece(choice, rest, "stop" if text.is_stopped else answer.finish_reason)
