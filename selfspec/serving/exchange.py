"""From a request to its calls, and from their tokens to what is sent: over HTTP and in files."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from threading import Lock
from time import perf_counter
from typing import Any

import regex
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
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.replies import Piece, usage_of
from selfspec.serving.schema import Chat, Completion, Settings, TextRequest

# Prepares a prompt, with a seed and the arguments of `generate()`.
Prepare = Callable[[PromptInputs, int, dict[str, Any], Hashable], Prompt]


class Reply:
    """What is sent of one text while its tokens come: whole characters, and calls of tools.

    Nothing of a stop string is sent. Stop strings are looked for in the text outside of calls. Of
    special tokens only those that belong to calls or are stop strings have a text. A reply is also
    the stopping criterion of its text. Then it hears a token twice, from two threads, and decodes
    it when it hears it first.
    """

    looks_at_rows = True

    def __init__(self, choice: int, tokenizer: Any, settings: Settings) -> None:
        form = form_of(str(tokenizer.chat_template))
        tools = settings.callable_tools if isinstance(settings, Chat) else []
        names = [tool.function.name for tool in tools]
        skips_special = settings.skip_special_tokens
        self._choice = choice
        self._stream = TextStream(tokenizer, skips_special=skips_special)
        self._reader = CallReader(form, names) if names else None
        self._calls_only = isinstance(settings, Chat) and settings.must_call
        stops = "|".join(map(regex.escape, sorted(settings.stops, key=len)))
        self._stops = regex.compile(stops) if stops else None
        self._shows_stop = settings.include_stop_str_in_output
        shown = {*settings.stops, *(form.marks if names else ())}
        added = tokenizer.added_tokens_decoder if shown and skips_special else {}
        special = {id: str(token) for id, token in added.items() if token.special}
        self._marks = {id: text for id, text in special.items() if text in shown}
        self._held = ""  # The end of the text, where a stop string may have begun.
        self.is_stopped = False
        self._lock = Lock()
        # How many tokens were decoded, told by the criterion's caller, and taken to be sent.
        self._num_decoded = self._num_told = self._num_taken = 0
        self._text, self._calls = "", list[dict[str, Any]]()  # What was decoded, but not taken.
        self._tells_ids = isinstance(settings, TextRequest) and settings.return_token_ids
        self._prompt_ids: list[int] | None = None
        self._scores: TokenScores | None = None
        self._num_scored = 0
        if isinstance(settings, Completion) and settings.echo:
            prompt = settings.prompts[choice // settings.n]
            self._text = prompt if isinstance(prompt, str) else self._stream.decoded(prompt)

    def expect(self, prompt: Prompt) -> None:
        """Sends ids and scores of tokens too, and of the prompt's, if the request wants them."""
        self._scores = prompt.scores
        if self._tells_ids:
            self._prompt_ids = prompt.input_ids[0].tolist()

    def add(self, ids: Sequence[int]) -> Piece:
        """Takes the next tokens; returns what may be sent now."""
        with self._lock:
            self._decode(ids[self._num_decoded - self._num_taken :])
            return self._taken(ids)

    def end(self, answer: Answer) -> Piece:
        """What is left of a text that is complete, and why it ended."""
        ids, reader = answer.ids[self._num_taken :], self._reader
        with self._lock:
            self._decode(ids[self._num_decoded - self._num_taken :])
            self._show(self._stream.rest())
            head = "" if reader is None else reader.end()  # It may be the beginning of a call.
            if self._calls_only:
                self._text += self._held + head
            else:
                self._text += self._before_stop(head) + self._held
            reason = "stop" if self.is_stopped else answer.finish_reason
            if reason == "stop" and reader is not None and reader.has_called:
                reason = "tool_calls"
            return self._taken(ids)._replace(finish_reason=reason)

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_more: object) -> torch.Tensor:
        with self._lock:
            if self._num_told == self._num_decoded:
                self._decode([int(input_ids[0, -1])])
            self._num_told += 1
        return torch.tensor([self.is_stopped], device=input_ids.device)

    def _taken(self, ids: Sequence[int]) -> Piece:
        self._num_taken += len(ids)
        piece = Piece(
            self._choice,
            self._text,
            calls=self._calls,
            scores=self._next_scores(),
            ids=ids if self._tells_ids else (),
            prompt_ids=self._prompt_ids,
        )
        self._text, self._calls, self._prompt_ids = "", [], None
        return piece

    def _next_scores(self) -> list[TokenScore]:
        """The scores of the tokens that were taken, after those of the prompt if it is sent."""
        if self._scores is None:
            return []
        tokens, prompt = self._scores.tokens or [], self._scores.prompt or []
        start = max(self._num_scored - len(prompt), 0)
        scores = [*prompt[self._num_scored :], *tokens[start : self._num_taken]]
        self._num_scored += len(scores)
        return scores

    def _decode(self, ids: Sequence[int]) -> None:
        self._num_decoded += len(ids)
        if self._marks.keys() & ids:
            self._show("".join(map(self._text_of, ids)))
        else:
            self._show(self._stream.add(*ids))

    def _text_of(self, token: int) -> str:
        mark = self._marks.get(token)
        return self._stream.add(token) if mark is None else self._stream.rest() + mark

    def _show(self, text: str) -> None:
        if self._reader is not None:
            text = self._reader.add(text, self._calls)
        self._text += self._before_stop(text)

    def _before_stop(self, text: str) -> str:
        """The text up to a stop string, or to where one may have begun."""
        if self.is_stopped or self._stops is None:
            return "" if self.is_stopped else text
        text, self._held = self._held + text, ""
        if stop := self._stops.search(text):
            self.is_stopped = True
            return text[: stop.end() if self._shows_stop else stop.start()]
        begun = self._stops.search(text, partial=True)
        end = len(text) if begun is None else begun.start()
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
            stops = settings.stops and arguments["max_new_tokens"]
            criteria = {"stopping_criteria": [reply]} if stops else {}
            prompt = prepare(ids, seed + number, {**arguments, **criteria}, scope)
            reply.expect(prompt)
            choices.append((prompt, reply))
    return choices


class Exchange:
    """A request from its fields to the pieces of its answers. Has its places in the line.

    `hold` hears how many bytes it has.
    """

    def __init__(
        self, model: ModelThread, request: TextRequest, hold: Callable[[int], object]
    ) -> None:
        self.first_at: float | None = None  # When the first token came, by `perf_counter`.
        has_tools = isinstance(request, Chat) and request.callable_tools
        self._schema_field = "tools" if has_tools else request.schema_field
        self._num_samples = request.n  # of a prompt
        self._hold = hold
        self._model = model
        self._indices, self._queue = model.enter(request.n * len(request.prompts))
        self._choices: list[tuple[Prompt, Reply]] = []
        self._answers: dict[int, Answer] = {}  # Those that are complete, by choice.

    def close(self) -> None:
        """Gives up the places. Texts that are not complete are dropped within a step."""
        for index in self._indices:
            self._model.forget(index)

    def usage(self) -> dict[str, Any]:
        """What all answers took. The samples of a prompt read it once."""
        answers = [answer for _, answer in sorted(self._answers.items())]
        return usage_of(answers, answers[:: self._num_samples])

    async def pieces(self, *, streams: bool) -> AsyncIterator[Piece]:
        """The texts as they come, or else whole. Raises what ends the request."""
        replies = [reply for _, reply in self._choices]
        for reply in replies if streams else ():
            yield reply.add(())
        while self._choices:  # A prompt that has ended is not kept.
            self._model.add(self._choices.pop(0)[0])
        while len(self._answers) < len(replies):
            index, event = await self._queue.get()
            choice = index - self._indices[0]
            self.first_at = self.first_at or perf_counter()
            if isinstance(event, RequestError):
                raise event
            if isinstance(event, Answer):
                if event.error is not None:
                    raise self._told(event.error)
                self._answers[choice] = event
                yield replies[choice].end(event)
            elif streams:
                piece = replies[choice].add(event)
                if not piece.is_first:
                    yield piece

    async def whole(self) -> list[Piece]:
        return [piece async for piece in self.pieces(streams=False)]

    def prepare(self, request: TextRequest, encoder: Encoder) -> None:
        """Makes the calls of a request; refuses what can't be answered. Any thread may ask."""
        seed = secrets.randbits(62) if request.seed is None else request.seed
        indices = iter(self._indices)
        sizes: list[int] = []  # of what a processor made of images

        def prepare(inputs: PromptInputs, *others: Any) -> Prompt:
            parts = inputs.values() if isinstance(inputs, Mapping) else ()
            sizes.extend(part.nbytes for part in parts if isinstance(part, torch.Tensor))
            return self._model.prompt(next(indices), inputs, *others)

        try:
            self._choices = choices_of(request, request.prompts, encoder, prepare, seed)
        except SelfSpecError as error:
            raise self._told(error) from error
        except (TypeError, ValueError) as error:  # What `generate()` says of its arguments.
            raise self._told(UnsupportedError(str(error))) from error
        self._hold(sum(sizes))

    def _told(self, error: Exception) -> RequestError:
        about_schema = "schema" in str(error)
        return RequestError.of(error, field=self._schema_field if about_schema else None)
