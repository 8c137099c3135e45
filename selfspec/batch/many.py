"""`generate_many`: the answers to any number of prompts, as they finish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from selfspec.batch.answers import Answer
from selfspec.batch.prompt_maker import PromptMaker
from selfspec.batch.prompts import PromptLike, inputs_of
from selfspec.errors import AttachError, ConfigError, UnsupportedError, no_tokenizer, shown
from selfspec.plugin.attach import check_assistant
from selfspec.plugin.spec import SelfSpec
from selfspec.prompt import Prompt
from selfspec.session import Scheduler, Session


def generate_many(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[PromptLike],
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

    A prompt that fails ends no other text: its answer has the exception as its `error`, and the
    text as far as it came.

    Args:
        model: A causal language model of transformers; it need not be attached.
        tokenizer: Its tokenizer, or its processor, with which messages may have images.
        prompts: Texts, lists of messages, token ids, or what a processor makes of one prompt. Up to
            256 are taken ahead of the answers. If the iterable raises an error, the prompts that
            were taken are answered first.
        assistant: The `SelfSpec` that drafts and learns; a new one by default, which drafts too.
        max_rows: The most texts that are written at the same time. They share each reading of the
            weights.
        max_memory: What the keys and values of all texts may take, in bytes or as text such as
            ``"2GB"``. A prompt starts only if its longest answer fits too. None: no limit.
        seed: For sampling: prompt `i` is drawn as after ``torch.manual_seed(seed + i)``. None:
            the seeds come from torch's generator.
        scheduler: Says which waiting prompt starts next; by default the one that came first.
            `ShortestFirst()` fits more rows into little memory.
        schema: What each answer must be: a JSON schema, or a model of pydantic. Needs the package
            llguidance.
        logprobs: How many of the likeliest tokens come with their log probabilities for each new
            token, beside its own: `Answer.logprobs`. They are the model's, before any processor.
        prompt_logprobs: The same for each token of a prompt: `Answer.prompt_logprobs`.
        generate_kwargs: What `generate()` takes, such as ``max_new_tokens=64``, for all prompts;
            `max_nodes`, a limit of their trees; OpenAI's `presence_penalty` and
            `frequency_penalty`, from -2 to 2.

    What is wrong with the arguments for every prompt is raised, before any text is written.
    """
    if assistant is not None:
        check_assistant(assistant)
    if not callable(getattr(model, "generate", None)):
        raise AttachError(
            f"model must be a model of transformers (got {shown(model)}); tokenizer and prompts "
            "come after it"
        )
    if not callable(tokenizer):
        raise no_tokenizer(tokenizer)
    # Each character of a text would be a prompt.
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise UnsupportedError(
            f"prompts must be a list of prompts (got {shown(prompts)}); put a prompt into a list"
        )
    numbers = {"seed": seed, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 0):
            raise ConfigError(f"{name} must be a whole number >= 0 (got {number!r})")
    if scheduler is not None and not hasattr(scheduler, "turn"):
        raise ConfigError(
            f"scheduler must have a method turn(), such as ShortestFirst() (got {shown(scheduler)})"
        )
    spec = SelfSpec() if assistant is None else assistant
    runner = spec.runner(model)
    session = Session(runner, spec, max_rows=max_rows, max_memory=max_memory, scheduler=scheduler)
    maker = PromptMaker(model, getattr(tokenizer, "tokenizer", tokenizer), spec)
    scores = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    common = {**generate_kwargs, **scores, "schema": schema}
    return _answers(session, maker, tokenizer, prompts, seed, common)


def _answers(
    session: Session,
    maker: PromptMaker,
    processor: Any,
    prompts: Iterable[PromptLike],
    seed: int | None,
    common: dict[str, Any],
) -> Iterator[Answer]:
    """The answers to prompts. `common` has the arguments of all."""
    errors = list[Exception]()

    def prepare(index: int, inputs: PromptLike) -> Prompt:
        row_seed = None if seed is None else seed + index
        return maker.prompt(index, inputs_of(inputs, processor), row_seed, common)

    def numbered() -> Iterator[tuple[int, Callable[[], Prompt]]]:
        try:
            for index, inputs in enumerate(prompts):
                yield index, partial(prepare, index, inputs)
        except Exception as error:  # Raised when all prompts before it are answered.
            errors.append(error)

    is_tried = False
    for answer in answered(session, numbered(), maker.tokenizer):
        if answer.finish_reason == "error" and not is_tried:  # Raises what is wrong for any prompt.
            session.memory.check(maker.prompt(0, [0], 0, common))
        is_tried = True
        yield answer
    if errors:
        raise errors[0]


def answered(
    session: Session, calls: Iterator[tuple[int, Callable[[], Prompt]]], tokenizer: Any = None
) -> Iterator[Answer]:
    """The answers to prompts, each as soon as it is complete.

    `calls` has the number of each prompt and what makes it, once there is a place for it. Without a
    tokenizer the answers have no text, for those who have decoded it while it came.
    """
    while True:
        fresh = list(islice(calls, session.num_wanted))
        if not fresh and session.is_empty:
            return
        for index, make in fresh:
            try:
                session.add(make())
            except Exception as error:
                yield Answer.refused(index, error)
        yield from (Answer.to(prompt, tokenizer) for prompt in session.work())
