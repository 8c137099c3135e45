"""From a request to its calls, and from their tokens to what is sent: over HTTP and in files."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from time import perf_counter
from typing import Any

import regex
import torch

from selfspec.batch import Answer
from selfspec.batch.call_forms import form_of
from selfspec.batch.call_reader import CallReader
from selfspec.batch.prompt_maker import PromptInputs
from selfspec.batch.text_stream import TextStream
from selfspec.batch.token_scores import TokenScore, TokenScores
from selfspec.errors import SelfSpecError, UnsupportedError
from selfspec.prompt import Prompt
from selfspec.serving.fields import RequestError
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.replies import Piece, usage_of
from selfspec.serving.schema import Chat, Completion, Settings, TextRequest
from selfspec.serving.translator import PromptTranslator

# Gets the next tokens of a text; returns pieces to be sent now, if there are any.
Heard = Callable[[Sequence[int]], list[Piece] | None]
# Prepares a prompt, with a seed and the arguments of `generate()`.
Prepare = Callable[[PromptInputs, int, dict[str, Any], Hashable, Heard], Prompt]


class StopFinder:
    """Looks for stop strings in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str], *, shows_stop: bool) -> None:
        self.is_stopped = False
        self._shows_stop = shows_stop
        pattern = "|".join(map(regex.escape, sorted(stops, key=len)))
        self._pattern = regex.compile(pattern) if pattern else None
        self._held = ""  # The end of the text, where a stop string may have begun.

    def add(self, text: str) -> str:
        """The text up to a stop string, or to where one may have begun."""
        if self.is_stopped or self._pattern is None:
            return "" if self.is_stopped else text
        text = self.rest() + text
        if stop := self._pattern.search(text):
            self.is_stopped = True
            return text[: stop.end() if self._shows_stop else stop.start()]
        begun = self._pattern.search(text, partial=True)
        end = len(text) if begun is None else begun.start()
        self._held = text[end:]
        return text[:end]

    def rest(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text


class ReplyDecoder:
    """What is sent of one text while its tokens come: whole characters, and calls of tools.

    Nothing of a stop string is sent. Stop strings are looked for in the text outside of calls. Of
    special tokens only those that belong to calls or are stop strings have a text. A reply with
    stop strings is also the stopping criterion of its text.
    """

    looks_at_rows = True

    def __init__(self, choice: int, tokenizer: Any, settings: Settings) -> None:
        form = form_of(str(tokenizer.chat_template))
        tools = settings.callable_tools if isinstance(settings, Chat) else []
        names = [tool.function.name for tool in tools]
        skips_special = settings.skip_special_tokens
        self.first_at: float | None = None  # When the first token came, by `perf_counter`.
        self._choice = choice
        self._stream = TextStream(tokenizer, skips_special=skips_special)
        self._reader = CallReader(form, names) if names else None
        self._calls_only = isinstance(settings, Chat) and settings.must_call
        self._stops = StopFinder(settings.stops, shows_stop=settings.include_stop_str_in_output)
        shown = {*settings.stops, *(form.marks if names else ())}
        added = tokenizer.added_tokens_decoder if shown and skips_special else {}
        special = {id: str(token) for id, token in added.items() if token.special}
        self._marks = {id: text for id, text in special.items() if text in shown}
        # How many more tokens the criterion has heard of than the streamer. Which of them is told
        # first depends on how the text is decoded.
        self._num_ahead = self._num_put = 0
        self._parts: list[str | dict[str, Any]] = []  # What was decoded, and is in no piece yet.
        self._pieces: list[Piece] = []  # What is to be sent.
        self._tells_ids = isinstance(settings, TextRequest) and settings.return_token_ids
        self._scores: TokenScores | None = None
        self._num_scored = 0
        self._echo = ""
        if isinstance(settings, Completion) and settings.echo:
            prompt = settings.prompts[choice // settings.n]
            self._echo = prompt if isinstance(prompt, str) else self._stream.decoded(prompt)

    def expect(self, prompt: Prompt) -> None:
        """Makes the first piece. It has the ids of the prompt if the request wants them."""
        self._scores = prompt.scores
        prompt_ids = prompt.input_ids[0].tolist() if self._tells_ids else None
        self._pieces = [Piece(self._choice, self._echo, prompt_ids=prompt_ids)]

    def listener(self, *, streams: bool) -> Heard:
        """What hears of tokens. A whole text without calls is decoded at its end, all at once."""
        if streams:
            return self.add
        return self._note if self._reader is None else self._put

    def _note(self, _ids: Sequence[int]) -> None:
        self.first_at = self.first_at or perf_counter()

    def _put(self, ids: Sequence[int]) -> None:
        """Takes the next tokens, and decodes those of which the criterion has not heard."""
        self._note(ids)
        fresh = ids[max(self._num_ahead, 0) :]
        self._num_ahead -= len(ids)
        self._num_put += len(ids)
        if self._reader is None and not self._marks.keys() & fresh:
            self._show(self._stream.add(*fresh))
        else:
            for token in fresh:
                self._decode(token)
        self._add_pieces(ids)

    def take(self) -> list[Piece]:
        """What may be sent now."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def add(self, ids: Sequence[int]) -> list[Piece]:
        """Takes the next tokens; returns what may be sent now."""
        self._put(ids)
        return self.take()

    def end(self, answer: Answer) -> list[Piece]:
        """What is left to be sent of a text that is complete, and why it ended."""
        reader = self._reader
        self._put(answer.ids[self._num_put :])
        self._show(self._stream.rest())
        head = "" if reader is None else reader.end()  # It may be the beginning of a call.
        if not self._calls_only:
            head = self._stops.add(head)
        rest = self._stops.rest()
        self._parts.append(rest + head if self._calls_only else head + rest)
        self._add_pieces()
        reason = "stop" if self._stops.is_stopped else answer.finish_reason
        if reason == "stop" and reader is not None and reader.has_called:
            reason = "tool_calls"
        return [*self.take(), Piece(self._choice, "", reason)]

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_more: object) -> torch.Tensor:
        self._num_ahead += 1
        if self._num_ahead > 0:
            self._decode(int(input_ids[0, -1]))
        return torch.tensor([self._stops.is_stopped], device=input_ids.device)

    def _add_pieces(self, ids: Sequence[int] = ()) -> None:
        """Makes pieces of what was decoded; the first one has the tokens."""
        about: dict[str, Any] = {
            "scores": self._next_scores(),
            "ids": ids if self._tells_ids else (),
        }
        for part in self._parts or [""]:
            text, calls = (part, []) if isinstance(part, str) else ("", [part])
            piece = Piece(self._choice, text, calls=calls, **about)
            if not piece.is_first:
                self._pieces.append(piece)
                about = {}
        self._parts = []

    def _next_scores(self) -> list[TokenScore]:
        """The scores of the tokens that came, after those of the prompt."""
        if self._scores is None:
            return []
        tokens, prompt = self._scores.tokens or [], self._scores.prompt or []
        start = max(self._num_scored - len(prompt), 0)
        scores = [*prompt[self._num_scored :], *tokens[start:]]
        self._num_scored += len(scores)
        return scores

    def _decode(self, token: int) -> None:
        mark = self._marks.get(token)
        self._show(self._stream.add(token) if mark is None else self._stream.rest() + mark)

    def _show(self, text: str) -> None:
        for part in [text] if self._reader is None else self._reader.add(text):
            if isinstance(part, str):
                self._parts.append(self._stops.add(part))
            else:  # No stop string goes past a call.
                self._parts += [self._stops.rest(), part]


def choices_of(
    settings: Settings,
    prompts: Sequence[Any],
    translator: PromptTranslator,
    prepare: Prepare,
    seed: int,
) -> list[tuple[Prompt, ReplyDecoder]]:
    """Each choice: its prompt, and what will be sent. Raises what is wrong with the first one."""
    choices: list[tuple[Prompt, ReplyDecoder]] = []
    scope, num_samples, streams = object(), 1, False
    if isinstance(settings, TextRequest):
        num_samples, streams = settings.n, settings.stream
    for inputs in prompts:
        ids, arguments = translator.arguments_for(inputs, settings)
        for number in range(num_samples):
            reply = ReplyDecoder(len(choices), translator.tokenizer, settings)
            # A prompt that is only scored has no text that could stop.
            stops = settings.stops and arguments["max_new_tokens"]
            criteria = {"stopping_criteria": [reply]} if stops else {}
            heard = reply.listener(streams=streams)
            prompt = prepare(ids, seed + number, {**arguments, **criteria}, scope, heard)
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
        has_tools = isinstance(request, Chat) and request.callable_tools
        self._schema_field = "tools" if has_tools else request.schema_field
        self._num_samples = request.n  # of a prompt
        self._streams = request.stream
        self._hold = hold
        self._model = model
        self._indices, self._queue = model.enter(request.n * len(request.prompts))
        self._prompts: list[Prompt] = []
        self._replies: list[ReplyDecoder] = []
        self._answers: dict[int, Answer] = {}  # Those that are complete, by choice.

    def close(self) -> None:
        """Gives up the places. Texts that are not complete are dropped within a step."""
        for index in self._indices:
            self._model.forget(index)

    def usage(self) -> dict[str, Any]:
        """What all answers took. The samples of a prompt read it once."""
        answers = [answer for _, answer in sorted(self._answers.items())]
        return usage_of(answers, answers[:: self._num_samples])

    @property
    def first_at(self) -> float | None:
        """When the first token came, by `perf_counter`."""
        return min((reply.first_at for reply in self._replies if reply.first_at), default=None)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The texts as they come, or else at their ends. Raises what ends the request."""
        for piece in (p for reply in self._replies if self._streams for p in reply.take()):
            yield piece
        while self._prompts:  # A prompt that has ended is not kept.
            self._model.add(self._prompts.pop(0))
        while len(self._answers) < len(self._replies):
            index, event = await self._queue.get()
            if isinstance(event, RequestError):
                raise event
            if isinstance(event, Answer):
                if event.error is not None:
                    raise self._told(event.error)
                choice = index - self._indices[0]
                self._answers[choice] = event
                event = self._replies[choice].end(event)
            for piece in event:
                yield piece

    async def whole(self) -> list[Piece]:
        return [piece async for piece in self.pieces()]

    def prepare(self, request: TextRequest, translator: PromptTranslator) -> None:
        """Makes the calls of a request; refuses what can't be answered. Any thread may ask."""
        seed = secrets.randbits(62) if request.seed is None else request.seed
        indices = iter(self._indices)
        sizes: list[int] = []  # of what a processor made of images

        def prepare(inputs: PromptInputs, *others: Any) -> Prompt:
            parts = inputs.values() if isinstance(inputs, Mapping) else ()
            sizes.extend(part.nbytes for part in parts if isinstance(part, torch.Tensor))
            return self._model.prompt(next(indices), inputs, *others)

        try:
            choices = choices_of(request, request.prompts, translator, prepare, seed)
            self._prompts, self._replies = [list(part) for part in zip(*choices, strict=True)]
        except SelfSpecError as error:
            raise self._told(error) from error
        except (TypeError, ValueError) as error:  # What `generate()` says of its arguments.
            raise self._told(UnsupportedError(str(error))) from error
        self._hold(sum(sizes))

    def _told(self, error: Exception) -> RequestError:
        about_schema = "schema" in str(error)
        return RequestError.of(error, field=self._schema_field if about_schema else None)
