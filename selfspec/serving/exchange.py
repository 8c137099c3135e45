"""From a request to its calls, and from their tokens to what is sent: over HTTP and in files."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from selfspec.batch.answers import Answer, OnTokens
from selfspec.batch.prompt_maker import PromptInputs
from selfspec.errors import SelfSpecError, UnsupportedError
from selfspec.prompt import Prompt
from selfspec.serving.fields import RequestError
from selfspec.serving.model_thread import ModelThread
from selfspec.serving.replies import Piece, usage_of
from selfspec.serving.reply_decoder import ReplyDecoder
from selfspec.serving.schema import Chat, Completion, TextRequest
from selfspec.serving.settings import Settings
from selfspec.serving.translator import PromptTranslator

# Prepares a prompt, with a seed and the arguments of `generate()`.
Prepare = Callable[[PromptInputs, int, dict[str, Any], Hashable, OnTokens], Prompt]


def choices_of(
    settings: Settings,
    prompts: Sequence[Any],
    translator: PromptTranslator,
    prepare: Prepare,
    seed: int,
) -> list[tuple[Prompt, ReplyDecoder]]:
    """Each choice: its prompt, and what will be sent. Raises what is wrong with the first one."""
    choices: list[tuple[Prompt, ReplyDecoder]] = []
    scope, tokenizer = object(), translator.tokenizer
    num_samples = settings.n if isinstance(settings, TextRequest) else 1
    echoes = isinstance(settings, Completion) and settings.echo
    for inputs in prompts:
        ids, arguments = translator.arguments_for(inputs, settings)
        for number in range(num_samples):
            reply = ReplyDecoder(len(choices), tokenizer, settings)
            criteria = {"stopping_criteria": [reply]} if reply.is_criterion else {}
            prompt = prepare(ids, seed + number, {**arguments, **criteria}, scope, reply.on_tokens)
            reply.begin(prompt, inputs if echoes else "")
            choices.append((prompt, reply))
    return choices


class Exchange:
    """A request from its fields to the pieces of its answers. Has its places in the line.

    `hold` is called with the number of bytes that it has.
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
        self._answers: dict[int, Answer] = {}  # Complete answers, by choice.

    def close(self) -> None:
        """Gives up the places. Texts that are not complete are dropped within a step."""
        for index in self._indices:
            self._model.forget(index)

    def usage(self) -> dict[str, Any]:
        """The tokens of all answers. The samples of one prompt count its tokens once."""
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
                    raise self._request_error(event.error)
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
            raise self._request_error(error) from error
        except (TypeError, ValueError) as error:  # What `generate()` says of its arguments.
            raise self._request_error(UnsupportedError(str(error))) from error
        self._hold(sum(sizes))

    def _request_error(self, error: Exception) -> RequestError:
        about_schema = "schema" in str(error)
        return RequestError.of(error, field=self._schema_field if about_schema else None)
