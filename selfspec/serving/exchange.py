"""From a request to its calls, and from their tokens to what is sent: over HTTP and in files."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any

import torch

from selfspec.batch import Answer
from selfspec.batch.call_forms import form_of
from selfspec.batch.call_reader import CallReader
from selfspec.batch.requests import PromptInputs
from selfspec.batch.text_stream import TextStream
from selfspec.batch.token_scores import TokenScore, TokenScores
from selfspec.errors import SelfSpecError, UnsupportedError
from selfspec.prompt import Prompt
from selfspec.serving.encoder import Encoder
from selfspec.serving.fields import RequestError
from selfspec.serving.images import has_addresses
from selfspec.serving.limits import in_thread
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.replies import Piece
from selfspec.serving.schema import Chat, Completion, Settings, TextRequest

# Prepares a prompt, with a seed and the arguments of `generate()`.
Prepare = Callable[[PromptInputs, int, dict[str, Any]], Prompt]


class Reply:
    """What is sent of one text while its tokens come: whole characters, and calls of tools.

    Nothing of a stop string is sent. Stop strings are looked for in the text outside of calls. Of
    special tokens only those that belong to calls or are stop strings have a text. A reply is also
    the stopping criterion of its text. Then it hears each token twice, from two threads, and
    decodes it when it hears it first.
    """

    looks_at_rows = True

    def __init__(self, choice: int, tokenizer: Any, settings: Settings) -> None:
        form = form_of(str(tokenizer.chat_template))
        tools = settings.callable_tools if isinstance(settings, Chat) else []
        names = [tool.function.name for tool in tools]
        self._choice = choice
        self._new_stream = partial(
            TextStream, tokenizer, skips_special=settings.skip_special_tokens
        )
        self._stream = self._new_stream()
        self._reader = CallReader(form, names) if names else None
        self._calls_only = isinstance(settings, Chat) and settings.must_call
        self._stops = settings.stop or ()
        self._shows_stop = settings.include_stop_str_in_output
        shown = {*self._stops, *(form.marks if names else ())}
        added = tokenizer.added_tokens_decoder if shown and settings.skip_special_tokens else {}
        special = {id: str(token) for id, token in added.items() if token.special}
        self._marks = {id: text for id, text in special.items() if text in shown}
        self._held = ""  # The end of the text, where a stop string may have begun.
        self.is_stopped = False
        self._lock = Lock()
        # How many tokens were decoded, told by the criterion's caller, and taken to be sent.
        self._num_decoded = self._num_told = self._num_taken = 0
        self._text, self._calls = "", list[dict[str, Any]]()  # What was decoded, but not taken.
        self._tells_ids = isinstance(settings, TextRequest) and settings.return_token_ids
        self.prompt_ids: list[int] | None = None
        self._scores: TokenScores | None = None
        self._num_scored = 0
        self._offsets: list[int] = []  # Where each token begins, if there are scores.
        self._length = 0  # of the text of all tokens so far
        if isinstance(settings, Completion) and settings.echo:
            prompt = settings.prompts[choice // settings.n]
            self._text = prompt if isinstance(prompt, str) else self._stream.decoded(prompt)

    def expect(self, prompt: Prompt) -> None:
        """Sends the ids and scores of the tokens too, and of the prompt's, where asked for."""
        if self._tells_ids:
            self.prompt_ids = prompt.input_ids[0].tolist()
        scores: TokenScores = prompt.scores
        if not scores.is_asked:
            return
        self._scores = scores
        stream = self._new_stream()
        for token in scores.prompt_ids:
            self._offsets.append(self._length)
            self._length += len(stream.add(token))
        self._length = len(self._text)

    def add(self, ids: Sequence[int]) -> Piece:
        """Takes the next tokens; returns what may be sent now."""
        with self._lock:
            self._decode(ids[self._num_decoded - self._num_taken :])
            self._num_taken += len(ids)
            text, self._text, calls, self._calls = self._text, "", self._calls, []
        scores = self._next_scores()
        start, self._num_scored = self._num_scored, self._num_scored + len(scores)
        offsets = self._offsets[start : self._num_scored]
        ids = ids if self._tells_ids else ()
        return Piece(self._choice, text, None, calls, scores, ids, offsets)

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_more: object) -> torch.Tensor:
        with self._lock:
            if self._num_told == self._num_decoded:
                self._decode([int(input_ids[0, -1])])
            self._num_told += 1
        return torch.tensor([self.is_stopped], device=input_ids.device)

    def end(self, answer: Answer) -> Piece:
        """What is left of a text that is complete, and why it ended."""
        before = self.add(answer.ids[self._num_taken :])
        text, calls = self._read(self._stream.rest())
        reader = self._reader
        head = "" if reader is None else reader.end()  # It may be the beginning of a call.
        if self._calls_only:
            text = before.text + self._before_stop(text) + self._held + head
        else:
            text = before.text + self._before_stop(text + head) + self._held
        reason = "stop" if self.is_stopped else answer.finish_reason
        if reason == "stop" and reader is not None and reader.num_calls and not reader.is_inside:
            reason = "tool_calls"
        return before._replace(text=text, finish_reason=reason, calls=[*before.calls, *calls])

    def _decode(self, ids: Sequence[int]) -> None:
        self._num_decoded += len(ids)
        if self._scores is not None or self._marks.keys() & ids:
            text = "".join(map(self._of, ids))
        else:
            text = self._stream.add(*ids)
        text, calls = self._read(text)
        self._text += self._before_stop(text)
        self._calls += calls

    def _of(self, token: int) -> str:
        mark = self._marks.get(token)
        text = self._stream.add(token) if mark is None else self._stream.rest() + mark
        self._offsets.append(self._length)
        self._length += len(text)
        return text

    def _next_scores(self) -> list[TokenScore]:
        """The scores of the tokens that were taken, after those of the prompt if it is sent."""
        if self._scores is None:
            return []
        tokens, prompt = self._scores.lists
        start = max(self._num_scored - len(prompt or ()), 0)
        return [*(prompt or ())[self._num_scored :], *(tokens or ())[start : self._num_taken]]

    def _read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        return (text, []) if self._reader is None else self._reader.add(text)

    def _before_stop(self, text: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        if places := [(text.index(stop), len(stop)) for stop in self._stops if stop in text]:
            self.is_stopped, self._held = True, ""
            place, length = min(places)
            return text[: place + length * self._shows_stop]
        begun = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        end = len(text) - max(begun, default=0)
        self._held = text[end:]
        return text[:end]


def choices_of(
    settings: Settings, prompts: Sequence[Any], encoder: Encoder, prepare: Prepare, seed: int
) -> list[tuple[Prompt, Reply]]:
    """Each choice: its prompt, and what will be sent. Raises what is wrong with the first one."""
    choices: list[tuple[Prompt, Reply]] = []
    scope = object()
    for inputs in prompts:
        ids, arguments = encoder.arguments_for(inputs, settings)
        for number in range(settings.n if isinstance(settings, TextRequest) else 1):
            reply = Reply(len(choices), encoder.tokenizer, settings)
            # A prompt that is only scored has no text that could stop.
            stops = settings.stop and arguments["max_new_tokens"]
            criteria = {"stopping_criteria": [reply]} if stops else {}
            prompt = prepare(ids, seed + number, {**arguments, **criteria})
            reply.expect(prompt)
            choices.append((prompt, reply))
            prompt.scope = scope
    return choices


class Exchange:
    """A request from its fields to the pieces of its answers. Has its places in the line.

    Its prompts are dropped once its calls are prepared, since images may be large. `hold` hears how
    many bytes it has.
    """

    def __init__(
        self, model: ModelThread, request: TextRequest, hold: Callable[[int], object]
    ) -> None:
        self.answers: dict[int, Answer] = {}  # Those that are complete, by choice.
        self.first_at: float | None = None  # When the first token came, by `perf_counter`.
        self.num_prompt_tokens = 0
        self._request: TextRequest | None = request
        has_tools = isinstance(request, Chat) and request.callable_tools
        self._schema_field = "tools" if has_tools else request.schema_field
        self._num_each = request.n
        self._hold = hold
        self._texts = model.enter(request.n * len(request.prompts))
        self._choices: list[tuple[Prompt, Reply]] = []

    def close(self) -> None:
        """Ends what is not complete."""
        self._texts.close()

    @property
    def num_kept_tokens(self) -> int:
        """How many tokens of prompts were not read, since another text had their KV."""
        answers = (self.answers[choice] for choice in sorted(self.answers)[:: self._num_each])
        return sum(answer.stats.num_prompt_tokens_kept for answer in answers)

    async def prepare(
        self, encoder: Encoder, turn: asyncio.Semaphore, fetching: asyncio.Semaphore
    ) -> None:
        """Refuses what can't be answered. Calls are prepared one request at a time.

        Images at addresses are fetched first, which may take many seconds.
        """
        request, self._request = self._request, None
        assert request is not None
        prompts = request.prompts
        if encoder.images.fetches and any(map(has_addresses, prompts)):
            fetched = partial(encoder.images.fetched, hold=self._hold)
            prompts = await in_thread(fetching, lambda: list(map(fetched, prompts)))
        num_bytes = await in_thread(turn, partial(self._prepare, request, prompts, encoder))
        self._hold(num_bytes)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes. Raises what ends the request without an answer."""
        prompts, replies = zip(*self._choices, strict=True)
        self._choices = []  # A prompt that has ended is not kept.
        for choice in range(len(prompts)):
            yield Piece(choice, "", prompt_ids=replies[choice].prompt_ids)
        async for choice, event in self._texts.events(prompts):
            self.first_at = self.first_at or perf_counter()
            if not isinstance(event, Answer):
                piece = replies[choice].add(event)
            elif event.error is not None:
                raise self._told(event.error)
            else:
                self.answers[choice] = event
                piece = replies[choice].end(event)
            if not piece.is_first:
                yield piece

    async def all_pieces(self) -> list[Piece]:
        return [piece async for piece in self.pieces()]

    def _prepare(self, request: TextRequest, prompts: Sequence[Any], encoder: Encoder) -> int:
        """Makes the calls; returns the bytes of what a processor made of their images."""
        seed = secrets.randbits(62) if request.seed is None else request.seed
        num_bytes = 0

        def prepare(inputs: PromptInputs, seed: int, arguments: dict[str, Any]) -> Prompt:
            nonlocal num_bytes
            parts = inputs.values() if isinstance(inputs, Mapping) else ()
            num_bytes += sum(getattr(tensor, "nbytes", 0) for tensor in parts)
            return self._texts.prepare(inputs, seed, arguments)

        try:
            self._choices = choices_of(request, prompts, encoder, prepare, seed)
        except SelfSpecError as error:
            raise self._told(error) from error
        except (TypeError, ValueError) as error:  # What `generate()` says of its arguments.
            raise self._told(UnsupportedError(str(error))) from error
        of_prompts = self._choices[:: request.n]
        self.num_prompt_tokens = sum(prompt.num_tokens for prompt, _ in of_prompts)
        return num_bytes

    def _told(self, error: Exception) -> RequestError:
        about_schema = "schema" in str(error)
        return RequestError.of(error, field=self._schema_field if about_schema else None)
