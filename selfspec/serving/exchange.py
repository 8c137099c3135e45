"""One request, and the texts that answer it, piece by piece as they come."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

from selfspec.batch import Answer
from selfspec.batch.prompt_call import PromptCall
from selfspec.batch.text_stream import TextStream
from selfspec.errors import SelfSpecError, UnsupportedError
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.prompt_files import Encoder, num_tokens
from selfspec.serving.replies import Piece
from selfspec.serving.schema import Chat, Request, RequestError
from selfspec.serving.tool_forms import form_of
from selfspec.serving.tools import CallReader, joined


class AnswerText:
    """The text of one answer as it may be sent: whole characters, and nothing of a stop string.

    Of special tokens only those among `marks` have a text.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), marks: Collection[str] = ()
    ) -> None:
        self._stream = TextStream(tokenizer)
        added = tokenizer.added_tokens_decoder if marks else {}
        shown = {id: str(each) for id, each in added.items() if each.special}
        self._marks = {id: text for id, text in shown.items() if text in marks}
        self._stops = stops
        self._held = ""  # The end of the text, where a stop string may have begun.
        self.is_stopped = False

    def add(self, ids: Sequence[int]) -> str:
        """Takes the next tokens; returns what may be sent now."""
        if not self._marks.keys() & ids:
            return self._pass(self._stream.add(*ids))
        return self._pass("".join(map(self._of, ids)))

    def end(self) -> str:
        """What is left, when no token comes any more."""
        return self._pass(self._stream.rest()) + self._held

    def _of(self, token: int) -> str:
        mark = self._marks.get(token)
        return self._stream.add(token) if mark is None else self._stream.rest() + mark

    def _pass(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        if found := [text.index(stop) for stop in self._stops if stop in text]:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        begun = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = len(text) - max(begun, default=0)
        self._held = text[end:]
        return text[:end]


class Exchange:
    """The texts of one request, from the first token to the last."""

    def __init__(self, model: ModelThread, request: Request) -> None:
        self.request = request
        self.num_choices = request.n * len(request.prompts)
        self.num_prompt_tokens = 0
        self.answers: list[Answer] = []  # Those that are complete.
        self.first_at: float | None = None  # When the first token came, by `perf_counter`.
        self._model = model
        self._prompts = request.prompts
        self._calls: list[PromptCall] = []

    async def prepare(self, encoder: Encoder, turn: asyncio.Lock) -> None:
        """Refuses what can't be answered.

        Images are read first, since an address may take ten seconds to answer. Then calls are
        prepared, one request at a time, each in a thread that ends: one that stayed would keep
        OpenMP threads, and more of these than cores slow down all answers.
        """
        loop, pictured = asyncio.get_running_loop(), encoder.images.pictured
        self._prompts = [
            await loop.run_in_executor(None, pictured, prompt) for prompt in self._prompts
        ]
        async with turn:
            with ThreadPoolExecutor(1) as pool:
                await loop.run_in_executor(pool, self._prepare, encoder)
        self._model.check_open(self.num_choices)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes. Raises what ends the request without an answer."""
        for choice in range(self.num_choices):
            yield Piece(choice, "")
        tokenizer, stops = self._model.tokenizer, self.request.stop or ()
        tools = self.request.callable_tools if isinstance(self.request, Chat) else []
        form, names = form_of(str(tokenizer.chat_template)), [each.function.name for each in tools]
        marks = form.marks if names else ()
        texts = [AnswerText(tokenizer, stops, marks) for _ in self._calls]
        readers = [CallReader(form, names) if names else None for _ in self._calls]
        async for choice, event in self._model.events(self._calls):
            self.first_at = self.first_at or perf_counter()
            text, reader, reason = texts[choice], readers[choice], None
            if isinstance(event, Answer):
                if event.error is not None:
                    raise self._told(event.error)
                self.answers.append(event)
                fresh, reason = text.end(), "stop" if text.is_stopped else event.finish_reason
            else:
                fresh = text.add(event)
            calls: list[dict[str, Any]] = []
            if reader is not None:
                fresh, calls = reader.add(fresh)
                if reason is not None:
                    fresh += reader.end()
                    reason = "tool_calls" if reason == "stop" and reader.num_calls else reason
            if fresh or calls or reason is not None:
                yield Piece(choice, fresh, reason, calls)

    async def whole(self) -> list[Piece]:
        """The whole text of each choice, with the reason why it ended."""
        texts = [Piece(choice, "") for choice in range(self.num_choices)]
        async for choice, text, reason, calls in self.pieces():
            before = texts[choice]
            texts[choice] = Piece(choice, before.text + text, reason, joined(before.calls, calls))
        return texts

    def _prepare(self, encoder: Encoder) -> None:
        request, model = self.request, self._model
        seed = secrets.randbits(62) if request.seed is None else request.seed
        try:
            for prompt in self._prompts:
                ids, arguments = encoder.arguments_for(prompt, request)
                self.num_prompt_tokens += num_tokens(ids)
                for number in range(request.n):
                    self._calls.append(model.call(ids, seed + number, arguments))
        except SelfSpecError as error:
            raise self._told(error) from error
        except (TypeError, ValueError) as error:  # What `generate()` says of its arguments.
            raise self._told(UnsupportedError(str(error))) from error

    def _told(self, error: Exception) -> RequestError:
        about_schema = "schema" in str(error) and self.request.answer_schema is not None
        return RequestError.of(error, field="response_format" if about_schema else None)
