"""One request and the texts that answer it: from what is asked to pieces of text as they come."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from selfspec.batch import Answer
from selfspec.batch.prompts import encoded
from selfspec.batch.ticket import Ticket
from selfspec.errors import SelfSpecError
from selfspec.serving.answering import Answering, News
from selfspec.serving.asked import Asked, Rules
from selfspec.serving.refusal import Refused
from selfspec.serving.text import TextStream

T = TypeVar("T")


class Piece(NamedTuple):
    """Some more text of a choice; the last piece says why the text ended."""

    choice: int
    text: str
    finish_reason: str | None


@dataclass
class Usage:
    """How many tokens a request took."""

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_accepted: int = 0  # Tokens of a prediction that came true.
    num_rejected: int = 0  # Those that were tried in vain.

    def count(self, answer: Answer) -> None:
        """Adds what one text took."""
        stats = answer.stats
        accepted = stats.accepted_by_source["prediction"]
        self.num_new_tokens += len(answer.ids)
        self.num_accepted += accepted
        self.num_rejected += stats.drafted_by_source["prediction"] - accepted


class Exchange:
    """The texts of one request, from the first token to the last."""

    def __init__(
        self, answering: Answering, tickets: list[Ticket], asked: Asked, num_prompt_tokens: int
    ) -> None:
        self._answering = answering
        self._tickets = tickets
        self._texts = [TextStream(answering.tokenizer, asked.stops) for _ in tickets]
        self._news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self.asked = asked
        self.usage = Usage(num_prompt_tokens)
        self.num_choices = len(tickets)
        self.first_token: float | None = None  # When it came, by `perf_counter`.

    def submit(self) -> None:
        """Lets all texts wait for a row."""
        for choice, ticket in enumerate(self._tickets):
            self._answering.submit(ticket, partial(self._hear, choice))

    def cancel(self) -> None:
        """Forgets the texts that are not complete."""
        for ticket in self._tickets:
            self._answering.cancel(ticket.index)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes. Raises what ends the request without an answer."""
        num_left = self.num_choices
        while num_left:
            choice, news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, Answer):
                num_left -= 1
                yield self._last(choice, news)
            elif text := self._texts[choice].add(news):
                yield Piece(choice, text, None)

    def _hear(self, choice: int, news: News) -> None:
        if self.first_token is None:
            self.first_token = perf_counter()
        self._news.put_nowait((choice, news))

    def _last(self, choice: int, answer: Answer) -> Piece:
        self.usage.count(answer)
        text = self._texts[choice]
        rest = text.end()
        return Piece(choice, rest, "stop" if text.is_stopped else answer.finish_reason)


class Exchanges:
    """Opens exchanges: tokens are counted and calls prepared, one request after the other."""

    def __init__(self, answering: Answering, rules: Rules) -> None:
        self._answering = answering
        self._rules = rules
        self._turn = asyncio.Lock()

    async def open(self, asked: Asked) -> Exchange:
        """Prepares and submits the texts of a request; refuses what can't be answered."""
        num_texts = len(asked.prompts) * asked.num_choices
        self._answering.check_open(num_texts)
        async with self._turn:
            exchange = await _aside(lambda: self._prepared(asked))
        self._answering.check_open(num_texts)
        exchange.submit()
        return exchange

    def _prepared(self, asked: Asked) -> Exchange:
        prompts = [self._encoded(prompt) for prompt in asked.prompts]
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        given = {"prediction": asked.prediction} if asked.prediction else {}
        tickets = []
        try:
            for ids in prompts:
                length = asked.num_new_tokens(len(ids), self._rules)
                for number in range(asked.num_choices):
                    arguments = {**asked.arguments, **given, "max_new_tokens": length}
                    tickets.append(self._answering.ticket(ids, seed + number, arguments))
        except (SelfSpecError, TypeError, ValueError) as error:
            raise Refused(" ".join(str(error).split())) from error
        return Exchange(self._answering, tickets, asked, sum(map(len, prompts)))

    def _encoded(self, prompt: Any) -> list[int]:
        tokenizer = self._answering.tokenizer
        field = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
        try:
            ids = encoded(prompt, tokenizer)
        except Exception as error:  # A template may raise whatever it likes.
            why = " ".join(str(error).split())[:300]
            raise Refused(f"{field} can't be made into tokens: {why}", field=field) from error
        if not ids:
            raise Refused(f"{field} must have at least one token (got none)", field=field)
        return ids


async def _aside(work: Callable[[], T]) -> T:
    """Runs work in a thread that ends, so that the event loop and the model's thread go on.

    A thread that stayed would keep threads of OpenMP, and with more of them than cores all wait.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # If nobody waits any more, the outcome is dropped.

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="selfspec request", daemon=True).start()
    return await asyncio.wrap_future(future)
