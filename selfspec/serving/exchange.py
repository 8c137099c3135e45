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
from selfspec.batch.requests import PromptInputs
from selfspec.batch.text_stream import TextStream
from selfspec.batch.token_scores import TokenScore, TokenScores
from selfspec.errors import SelfSpecError, UnsupportedError
from selfspec.prompt import Prompt
from selfspec.serving.images import check_pixels
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.prompt_files import Encoder
from selfspec.serving.replies import Piece
from selfspec.serving.schema import Chat, Completion, RequestError, Settings, TextRequest
from selfspec.serving.tool_forms import form_of
from selfspec.serving.tools import CallReader

# Prepares a prompt, with a seed and the arguments of `generate()`.
Prepare = Callable[[PromptInputs, int, dict[str, Any]], Prompt]


class Reply:
    """What is sent of one text while its tokens come: whole characters, and calls of tools.

    Nothing of a stop string is sent. Stop strings are looked for in the text outside of calls. Of
    special tokens only those that belong to calls or are stop strings have a text. Another one of
    the same text is the stopping criterion of its call, which hears each token.
    """

    looks_at_rows = True

    def __init__(
        self, choice: int, tokenizer: Any, settings: Settings, scores: TokenScores | None = None
    ) -> None:
        form = form_of(str(tokenizer.chat_template))
        tools = settings.callable_tools if isinstance(settings, Chat) else []
        names = [each.function.name for each in tools]
        self._choice = choice
        self._stream = TextStream(tokenizer, skips_special=settings.skip_special_tokens)
        self._reader = CallReader(form, names) if names else None
        self._stops = settings.stop or ()
        self._shows_stop = settings.include_stop_str_in_output
        shown = {*self._stops, *(form.marks if names else ())}
        added = tokenizer.added_tokens_decoder if shown and settings.skip_special_tokens else {}
        special = {id: str(each) for id, each in added.items() if each.special}
        self._marks = {id: text for id, text in special.items() if text in shown}
        self._held = ""  # The end of the text, where a stop string may have begun.
        self._num_read = 0
        self.is_stopped = False
        self._scores = scores
        self._num_scored = 0  # How long the texts of all tokens are whose scores were sent.
        self._echoed: str | None = None  # The prompt, until it is sent.
        if isinstance(settings, Completion) and settings.echo:
            prompt = settings.prompts[choice // settings.n]
            self._echoed = prompt if isinstance(prompt, str) else self._stream.decoded(prompt)

    def add(self, ids: Sequence[int]) -> Piece:
        """Takes the next tokens; returns what may be sent now."""
        has_marks = bool(self._marks.keys() & ids)
        text = "".join(map(self._of, ids)) if has_marks else self._stream.add(*ids)
        text, calls = self._read(text)
        scores, offset = self._next_scores(len(ids)), self._num_scored
        self._num_scored += sum(len(each.text) for each in scores)
        text = (self._echoed or "") + self._before_stop(text)
        self._echoed = None
        return Piece(self._choice, text, None, calls, scores, offset)

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_more: Any) -> torch.Tensor:
        self.add([int(input_ids[0, -1])])
        return torch.tensor([self.is_stopped], device=input_ids.device)

    def end(self, answer: Answer) -> Piece:
        """What is left of a text that is complete, and why it ended."""
        before = self.add(answer.ids[self._num_read :])
        text, calls = self._read(self._stream.rest())
        held_back = "" if self._reader is None else self._reader.end()
        text = before.text + self._before_stop(text + held_back) + self._held
        reason = "stop" if self.is_stopped else answer.finish_reason
        reader = self._reader
        if reason == "stop" and reader is not None and reader.num_calls and not reader.is_inside:
            reason = "tool_calls"
        return before._replace(text=text, finish_reason=reason, calls=[*before.calls, *calls])

    def _of(self, token: int) -> str:
        mark = self._marks.get(token)
        return self._stream.add(token) if mark is None else self._stream.rest() + mark

    def _next_scores(self, number: int) -> list[TokenScore]:
        """The scores of the next tokens, after those of the prompt if it is sent, too."""
        start, self._num_read = self._num_read, self._num_read + number
        tokens, prompt = (None, None) if self._scores is None else self._scores.lists
        of_prompt = [] if self._echoed is None else prompt or []
        return of_prompt + (tokens or [])[start : self._num_read]

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return (text, []) if self._reader is None else self._reader.add(text)

    def _before_stop(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        if found := [(text.index(stop), len(stop)) for stop in self._stops if stop in text]:
            self.is_stopped, self._held = True, ""
            place, length = min(found)
            return text[: place + length * self._shows_stop]
        begun = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = len(text) - max(begun, default=0)
        self._held = text[end:]
        return text[:end]


def prompts_of(
    settings: Settings, prompts: Sequence[Any], encoder: Encoder, prepare: Prepare, seed: int
) -> list[Prompt]:
    """The prompt of each choice; raises what is wrong with the first one that can't be prepared."""
    prepared = []
    for prompt in prompts:
        ids, arguments = encoder.arguments_for(prompt, settings)
        for number in range(settings.n if isinstance(settings, TextRequest) else 1):
            if settings.stop:
                criteria = [Reply(0, encoder.tokenizer, settings)]
                arguments = {**arguments, "stopping_criteria": criteria}
            prepared.append(prepare(ids, seed + number, arguments))
    for prompt in prepared:
        prompt.scope = prepared[0].scope
    return prepared


class Exchange:
    def __init__(self, model: ModelThread, request: TextRequest) -> None:
        self.request = request
        self.answers: dict[int, Answer] = {}  # Those that are complete, by choice.
        self.first_at: float | None = None  # When the first token came, by `perf_counter`.
        self.num_pixels = 0  # of its images, until it is over
        self._model = model
        self._prompts: list[Prompt] = []

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self._prompts[:: self.request.n])

    @property
    def num_kept_tokens(self) -> int:
        """How many of these tokens were not read, since another text had their keys and values."""
        prompts = self._prompts[:: self.request.n]
        return sum(prompt.stats.num_prompt_tokens_kept for prompt in prompts)

    async def prepare(
        self, encoder: Encoder, turn: asyncio.Lock, exchanges: Iterable[Exchange]
    ) -> None:
        """Refuses what can't be answered beside all exchanges that are not over.

        Images are fetched first, since an address may take ten seconds to answer. Then calls are
        prepared, one request at a time, each in a thread that ends: one that stayed would keep
        OpenMP threads, and more of these than cores slow down all answers.
        """
        loop, fetched = asyncio.get_running_loop(), encoder.images.fetched
        self._model.check_open(self.request.n * len(self.request.prompts))
        prompts = [
            await loop.run_in_executor(None, fetched, prompt) for prompt in self.request.prompts
        ]
        self.num_pixels = check_pixels(prompts, sum(each.num_pixels for each in exchanges))
        try:
            async with turn:
                with ThreadPoolExecutor(1) as pool:
                    await loop.run_in_executor(pool, self._prepare, prompts, encoder)
            self._model.check_open(len(self._prompts))
        except BaseException:
            self.num_pixels = 0
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes. Raises what ends the request without an answer."""
        numbers = range(len(self._prompts))
        for choice in numbers:
            yield Piece(choice, "")
        replies = list(map(self._reply, numbers))
        try:
            async for choice, event in self._model.events(self._prompts):
                self.first_at = self.first_at or perf_counter()
                if not isinstance(event, Answer):
                    piece = replies[choice].add(event)
                elif event.error is not None:
                    raise self._told(event.error)
                else:
                    self.answers[choice] = event
                    piece = replies[choice].end(event)
                if any(piece[1:5]):
                    yield piece
        finally:
            self.num_pixels = 0

    async def whole(self) -> list[Piece]:
        async for _piece in self.pieces():
            pass
        return [self._reply(each).end(self.answers[each]) for each in sorted(self.answers)]

    def _reply(self, choice: int) -> Reply:
        scores = self._prompts[choice].scores
        return Reply(choice, self._model.tokenizer, self.request, scores)

    def _prepare(self, prompts: Sequence[Any], encoder: Encoder) -> None:
        request, prepare = self.request, self._model.prepare
        seed = secrets.randbits(62) if request.seed is None else request.seed
        try:
            self._prompts = prompts_of(request, prompts, encoder, prepare, seed)
        except SelfSpecError as error:
            raise self._told(error) from error
        except (TypeError, ValueError) as error:  # What `generate()` says of its arguments.
            raise self._told(UnsupportedError(str(error))) from error

    def _told(self, error: Exception) -> RequestError:
        about_schema = "schema" in str(error)
        return RequestError.of(error, field=self.request.schema_field if about_schema else None)
