"""From a request to its calls, and from their tokens to what is sent: over HTTP and in files."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch

from selfspec.batch import Answer
from selfspec.batch.prompt_call import PromptCall, PromptInputs
from selfspec.batch.text_stream import TextStream
from selfspec.errors import SelfSpecError, UnsupportedError
from selfspec.serving.images import check_pixels, num_pixels
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.prompt_files import Encoder
from selfspec.serving.replies import Piece
from selfspec.serving.schema import Chat, Request, RequestError, Settings
from selfspec.serving.tool_forms import form_of
from selfspec.serving.tools import CallReader

# Makes the call of a prompt with a seed and the arguments of `generate()`.
MakeCall = Callable[[PromptInputs, int, dict[str, Any]], PromptCall]


class Reply:
    """What is sent of one text while its tokens come: whole characters, and calls of tools.

    Nothing of a stop string is sent. Stop strings are looked for in the text outside of calls. Of
    special tokens only those that belong to calls or are stop strings have a text.
    """

    def __init__(self, choice: int, tokenizer: Any, settings: Settings) -> None:
        form = form_of(str(tokenizer.chat_template))
        tools = settings.callable_tools if isinstance(settings, Chat) else []
        names = [each.function.name for each in tools]
        self._choice = choice
        self._stream = TextStream(tokenizer)
        self._reader = CallReader(form, names) if names else None
        self._stops = settings.stop or ()
        shown = {*self._stops, *(form.marks if names else ())}
        added = tokenizer.added_tokens_decoder if shown else {}
        special = {id: str(each) for id, each in added.items() if each.special}
        self._marks = {id: text for id, text in special.items() if text in shown}
        self._held = ""  # The end of the text, where a stop string may have begun.
        self._num_read = 0
        self.is_stopped = False

    def add(self, ids: Sequence[int]) -> Piece:
        """Takes the next tokens; returns what may be sent now."""
        self._num_read += len(ids)
        if not self._marks.keys() & ids:
            return self._piece(self._stream.add(*ids))
        return self._piece("".join(map(self._of, ids)))

    def end(self, answer: Answer) -> Piece:
        """What is left of a text that is complete, and why it ended."""
        before = self.add(answer.ids[self._num_read :])
        text, calls = self._read(self._stream.rest())
        held_back = "" if self._reader is None else self._reader.end()
        text = before.text + self._before_stop(text + held_back) + self._held
        reason = "stop" if self.is_stopped else answer.finish_reason
        if reason == "stop" and self._reader is not None and self._reader.num_calls:
            reason = "tool_calls"
        return Piece(self._choice, text, reason, [*before.calls, *calls])

    def _of(self, token: int) -> str:
        mark = self._marks.get(token)
        return self._stream.add(token) if mark is None else self._stream.rest() + mark

    def _piece(self, text: str) -> Piece:
        text, calls = self._read(text)
        return Piece(self._choice, self._before_stop(text), None, calls)

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return (text, []) if self._reader is None else self._reader.add(text)

    def _before_stop(self, text: str) -> str:
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


class _StopsReply:
    """A stopping criterion of `generate()`: has a stop string come in what is sent of the text?"""

    looks_at_rows = True

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._length = 0

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_more: Any) -> torch.Tensor:
        fresh = input_ids[0, self._length or -1 :].tolist()
        self._length = input_ids.shape[1]
        self._reply.add(fresh)
        return torch.tensor([self._reply.is_stopped], device=input_ids.device)


def calls_of(
    settings: Settings, prompts: Sequence[Any], encoder: Encoder, make_call: MakeCall, seed: int
) -> list[PromptCall]:
    """The call of each choice; raises what is wrong with the first one that can't be made."""
    calls = []
    for prompt in prompts:
        ids, arguments = encoder.arguments_for(prompt, settings)
        for number in range(settings.n if isinstance(settings, Request) else 1):
            if settings.stop:
                reply = Reply(0, encoder.tokenizer, settings)
                arguments = {**arguments, "stopping_criteria": [_StopsReply(reply)]}
            calls.append(make_call(ids, seed + number, arguments))
    return calls


class Exchange:
    """The texts of one request to the server, from the first token to the last."""

    def __init__(self, model: ModelThread, request: Request) -> None:
        self.request = request
        self.answers: list[Answer] = []  # Those that are complete.
        self.first_at: float | None = None  # When the first token came, by `perf_counter`.
        self.num_pixels = 0  # of its images, until it is over
        self._model = model
        self._calls: list[PromptCall] = []

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens all prompts have."""
        return sum(each.call.num_tokens for each in self._calls[:: self.request.n])

    async def prepare(
        self, encoder: Encoder, turn: asyncio.Lock, exchanges: Iterable[Exchange]
    ) -> None:
        """Refuses what can't be answered beside all exchanges that are not over.

        Images are fetched first, since an address may take ten seconds to answer. Then they are
        decoded and calls are prepared, one request at a time, each in a thread that ends: one that
        stayed would keep OpenMP threads, and more of these than cores slow down all answers.
        """
        loop, fetched = asyncio.get_running_loop(), encoder.images.fetched
        self._model.check_open(self.request.n * len(self.request.prompts))
        prompts = [
            await loop.run_in_executor(None, fetched, prompt) for prompt in self.request.prompts
        ]
        self.num_pixels = sum(map(num_pixels, prompts))
        try:
            if self.num_pixels:
                check_pixels(sum(each.num_pixels for each in exchanges))
            async with turn:
                with ThreadPoolExecutor(1) as pool:
                    await loop.run_in_executor(pool, self._prepare, prompts, encoder)
            self._model.check_open(len(self._calls))
        except BaseException:
            self.num_pixels = 0
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes. Raises what ends the request without an answer."""
        numbers = range(len(self._calls))
        for choice in numbers:
            yield Piece(choice, "")
        replies = [Reply(choice, self._model.tokenizer, self.request) for choice in numbers]
        try:
            async for choice, event in self._model.events(self._calls):
                self.first_at = self.first_at or perf_counter()
                if not isinstance(event, Answer):
                    piece = replies[choice].add(event)
                elif event.error is not None:
                    raise self._told(event.error)
                else:
                    self.answers.append(event)
                    piece = replies[choice].end(event)
                if any(piece[1:]):
                    yield piece
        finally:
            self.num_pixels = 0

    async def whole(self) -> list[Piece]:
        """The whole text of each choice, with the reason why it ended."""
        texts = [Piece(choice, "") for choice in range(len(self._calls))]
        async for piece in self.pieces():
            before = texts[piece.choice]
            calls = [*before.calls, *piece.calls]
            texts[piece.choice] = piece._replace(text=before.text + piece.text, calls=calls)
        return texts

    def _prepare(self, prompts: Sequence[Any], encoder: Encoder) -> None:
        request, call = self.request, self._model.call
        seed = secrets.randbits(62) if request.seed is None else request.seed
        try:
            self._calls = calls_of(request, prompts, encoder, call, seed)
        except SelfSpecError as error:
            raise self._told(error) from error
        except (TypeError, ValueError) as error:  # What `generate()` says of its arguments.
            raise self._told(UnsupportedError(str(error))) from error

    def _told(self, error: Exception) -> RequestError:
        about_schema = "schema" in str(error) and self.request.answer_schema is not None
        return RequestError.of(error, field="response_format" if about_schema else None)
