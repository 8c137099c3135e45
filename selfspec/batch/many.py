"""`generate_many`: the answers to any number of prompts, as they finish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from selfspec.batch.prompt_call import Answer
from selfspec.batch.prompts import Prompt, inputs_of
from selfspec.batch.schedule import Scheduler
from selfspec.batch.session import Session
from selfspec.errors import UnsupportedError
from selfspec.plugin.attach import check_assistant
from selfspec.plugin.spec import SelfSpec


def generate_many(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    *,
    assistant: SelfSpec | None = None,
    max_rows: int = 8,
    max_memory: int | str | None = None,
    seed: int | None = None,
    scheduler: Scheduler | None = None,
    schema: Any = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    **generate_kwargs: Any,
) -> Iterator[Answer]:
    """Answers many prompts over one model; yields each `Answer` as soon as it is complete.

    Rows of a batch come and go: when a text ends, the next prompt takes its place without waiting
    for the others. Each text is what `generate()` gives for that prompt alone.

    A prompt that fails ends no other text: it has an answer too, with the exception as its `error`
    and the text as far as it came. ``if answer.error: raise answer.error`` stops at the first one.

    Args:
        model: A causal language model of transformers; it need not be attached.
        tokenizer: Its tokenizer, or its processor, with which messages may have images.
        prompts: Texts, lists of messages, token ids, or what a processor makes of one prompt. Up to
            256 are taken ahead of the answers. If the iterable raises an error, the prompts that
            were taken are answered first.
        assistant: The `SelfSpec` that drafts and learns; a new one by default.
        max_rows: The most texts that are written at the same time. More texts share each reading
            of the weights, which pays as long as the device computes faster than it reads them.
        max_memory: What the keys and values of all texts may take, in bytes or as text such as
            ``"2GB"``. A prompt starts only if its longest answer fits too. None: no limit.
        seed: For sampling: prompt `i` is drawn as after ``torch.manual_seed(seed + i)``. None:
            the seeds come from torch's generator.
        scheduler: Chooses which waiting prompts start; by default those that came first.
            `ShortestFirst()` fits more rows into little memory.
        schema: What each answer must be: a JSON schema, or a model of pydantic. Or a list with one
            for each prompt, where None leaves a text free. Needs the extra ``selfspec[grammar]``.
        logprobs: So many of the likeliest tokens, with their log probabilities, for each new token,
            and its own: `Answer.logprobs`. They are the model's own, before any processor.
        prompt_logprobs: The same for each token of a prompt: `Answer.prompt_logprobs`. With
            ``max_new_tokens=0`` a prompt is only scored.
        generate_kwargs: What `generate()` takes, such as ``max_new_tokens=64``, for all prompts;
            `max_nodes`, a limit of their trees; OpenAI's `presence_penalty` and
            `frequency_penalty`, from -2 to 2.

    Raises:
        UnsupportedError: The arguments can't be served for any prompt: the first prompt is
            refused, and so is a prompt of one token. This raises whatever `generate()` raises of
            the arguments, before any text is written.
    """
    if assistant is not None:
        check_assistant(assistant)
    if isinstance(prompts, str):  # Each of its characters would be a prompt.
        raise UnsupportedError(
            f"prompts must be a list of prompts (got the text {prompts!r:.40}); put it into a list"
        )
    session = Session(
        model,
        getattr(tokenizer, "tokenizer", tokenizer),  # That of a processor.
        SelfSpec() if assistant is None else assistant,
        max_rows=max_rows,
        max_memory=max_memory,
        scheduler=scheduler,
    )
    scores = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    common = {
        **generate_kwargs,
        **scores,
        "schema": None if isinstance(schema, (list, tuple)) else schema,
    }
    return _answers(session, tokenizer, _with_schemas(prompts, schema), seed, common)


def _with_schemas(prompts: Iterable[Prompt], schema: Any) -> Iterator[tuple[Prompt, Any]]:
    """Each prompt with what its answer must be."""
    is_list, number = isinstance(schema, (list, tuple)), 0
    for number, prompt in enumerate(prompts, start=1):
        if is_list and number > len(schema):
            break
        yield prompt, schema[number - 1] if is_list else schema
    if is_list and number != len(schema):
        raise UnsupportedError(
            f"schema must be one for all prompts or a list with one for each (got {len(schema)}, "
            f"and {'more' if number > len(schema) else number} prompts)"
        )


def _answers(
    session: Session,
    tokenizer: Any,
    prompts: Iterable[tuple[Prompt, Any]],
    seed: int | None,
    common: dict[str, Any],
) -> Iterator[Answer]:
    given, is_tried = _Given(enumerate(prompts)), False
    while True:
        for index, (prompt, schema) in given.next(session.num_wanted):
            own_seed = None if seed is None else seed + index
            arguments = {**common, "schema": schema}
            error = _refusal(session, index, prompt, tokenizer, own_seed, arguments)
            if error is not None:
                if not is_tried:
                    session.call(0, [0], 0, common)  # Raises what is wrong for any prompt.
                yield Answer.refused(index, error)
            is_tried = True
        if session.is_empty:
            given.end()
            return
        yield from session.work()


class _Given:
    """What an iterator gives. If it raises, that is its end, and `end` raises the error."""

    def __init__(self, values: Iterator[tuple[int, tuple[Prompt, Any]]]) -> None:
        self._values = values
        self._error: Exception | None = None

    def next(self, most: int) -> Iterator[tuple[int, tuple[Prompt, Any]]]:
        """The next ones, at most so many."""
        try:
            yield from islice(self._values, most)
        except Exception as error:
            self._error, self._values = error, iter(())

    def end(self) -> None:
        """Raises the error that ended the iterator, once all else is answered."""
        if self._error is not None:
            raise self._error


def _refusal(
    session: Session,
    index: int,
    prompt: Prompt,
    tokenizer: Any,
    seed: int | None,
    arguments: dict[str, Any],
) -> Exception | None:
    """Lets a prompt wait, or says why it can't."""
    try:
        session.submit(index, inputs_of(prompt, tokenizer), seed, arguments)
    except Exception as error:
        return error
    return None
