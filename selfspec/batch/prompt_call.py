"""The call that `generate()` would make of one of many prompts, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch

from selfspec.compat.generation import KV_NAMES, kv_of, with_kv
from selfspec.errors import UnsupportedError, kept
from selfspec.machine.device import own_seed
from selfspec.plugin.arguments import for_drafts, loop_of
from selfspec.plugin.call import Call
from selfspec.plugin.request import request_of
from selfspec.plugin.row_rules import end_ids
from selfspec.plugin.spec import SelfSpec
from selfspec.request import Request
from selfspec.row import Streamer
from selfspec.stats import GenerationStats

# Token ids, or what a processor made of a prompt: `input_ids` and what belongs to them.
PromptInputs = Sequence[int] | Mapping[str, Any]

# Gets the index of a prompt and its new tokens. Returns False if their reader is gone.
Hear = Callable[[int, Sequence[int]], bool]

# Arguments of `generate()` that make sense for one call only.
_OF_ONE_CALL = (
    "attention_mask",
    "custom_generate",
    "input_ids",
    "inputs_embeds",
    "streamer",
    *KV_NAMES,
)


@dataclass(frozen=True)
class Answer:
    """What the model wrote after one prompt.

    Attributes:
        index: Which prompt it is, counted from 0 in the order in which they were given.
        text: The new text, without special tokens; after an error, as far as it came.
        ids: The new tokens, the end-of-text token among them.
        finish_reason: ``"stop"`` if the model or a stop string ended the text, ``"length"`` if it
            was cut off at the most tokens, ``"error"`` if an error ended it.
        num_prompt_tokens: How many tokens the prompt has.
        stats: What was counted for this prompt. Of the time of a step, each row has an equal share.
        error: The exception that has ended the text, or why the prompt was refused; its traceback
            is the text of its cause. None: all went well.
    """

    index: int
    text: str
    ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    stats: GenerationStats
    error: Exception | None = None

    @classmethod
    def to(
        cls, asked: PromptCall, ids: list[int], tokenizer: Any, error: Exception | None = None
    ) -> Answer:
        """The answer that a prompt's new tokens are, to their end or to an error."""
        call, text, num_prompt_tokens = asked.call, "", asked.call.num_tokens
        try:
            text = tokenizer.decode(ids, skip_special_tokens=True)
        except Exception as fault:
            error = error or fault
        is_ended = bool(ids) and ids[-1] in end_ids(call.generation_config)
        is_cut = not is_ended and num_prompt_tokens + len(ids) >= call.max_length
        reason = "error" if error is not None else "length" if is_cut else "stop"
        kept_error = None if error is None else kept(error)
        return cls(asked.index, text, ids, reason, num_prompt_tokens, asked.stats, kept_error)

    @classmethod
    def refused(cls, index: int, error: Exception) -> Answer:
        """The answer to a prompt of which no call could be made."""
        return cls(index, "", [], "error", 0, GenerationStats(), kept(error))


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptCall:
    """One of many prompts, and how it is answered: with others, or in a call of its own.

    `alone_reason` says why it can't share forwards; if it can, `request` is what the engine gets.
    """

    index: int
    call: Call
    stats: GenerationStats
    alone_reason: str | None
    request: Request | None
    decode_alone: Callable[[Callable[[list[int]], bool]], list[int] | None]

    @property
    def max_columns(self) -> int:
        """How many columns of KV it may come to need."""
        return self.call.max_columns


def call_for(
    index: int,
    prompt: PromptInputs,
    seed: int | None,
    model: Any,  # or what wraps it, as PEFT does
    tokenizer: Any,
    spec: SelfSpec,
    arguments: dict[str, Any],
    streamer: Streamer | None = None,
) -> PromptCall:
    """Lets `generate()` prepare the call, up to where it would decode; runs no forward.

    Of a prompt with images, transformers encodes the images here, from 5.24 on. `streamer` gets the
    tokens if the prompt shares forwards with others.
    """
    for name in _OF_ONE_CALL:
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"{name} belongs to one call of generate() and can't be used for many prompts; "
                "leave it out"
            )
    ours = {"tokenizer": tokenizer, "return_dict_in_generate": False}
    arguments = for_drafts(model, {**arguments, **ours})
    stats, inputs = GenerationStats(num_calls=1), inputs_on(prompt, model)

    @wraps(spec.open_call)  # transformers hands over what its signature names.
    def opened(*args: Any, **kwargs: Any) -> tuple[Call, str | None]:
        call = spec.open_call(*args, **kwargs)
        # A wrapper of PEFT changes the model until its generate() returns.
        return call, call.route.alone

    loop = loop_of(opened, model, arguments)
    call: Call
    call, alone_reason = model.generate(**inputs, custom_generate=loop, **arguments)
    if len(call.input_ids) != 1:
        raise UnsupportedError(
            f"num_return_sequences must be 1, since each prompt gets one answer (got "
            f"{len(call.input_ids)}); give the prompt several times"
        )
    generator = None
    if call.generation_config.do_sample:
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        generator = torch.Generator(call.input_ids.device).manual_seed(seed)
    request = None
    if alone_reason is None:
        call = replace(call, streamer=streamer)
        request = request_of(call, stats, index=index, generator=generator, fails_alone=True)
    else:  # Its own call makes the others anew; images may be large.
        call = replace(call, model_kwargs=with_kv(kv_of(call.model_kwargs)))
    return PromptCall(
        index=index,
        call=call,
        stats=stats,
        alone_reason=alone_reason,
        request=request,
        decode_alone=partial(_decode_alone, spec, model, inputs, seed, arguments, stats),
    )


def _decode_alone(
    spec: SelfSpec,
    model: Any,
    inputs: dict[str, Any],
    seed: int | None,
    arguments: dict[str, Any],
    stats: GenerationStats,
    hear: Callable[[list[int]], bool],
) -> list[int] | None:
    """Decodes the prompt with a `generate()` call of its own; returns the new tokens.

    `hear` gets each token at once. None if it says that its reader is gone.
    """
    streamer = _Forwarder(hear)

    @wraps(spec.open_call)
    def decoded(*args: Any, **kwargs: Any) -> list[int]:
        call = spec.open_call(*args, **kwargs)
        new_ids: list[int] = spec.decode(call, stats)[0, call.num_tokens :].tolist()
        return new_ids

    with own_seed(seed, [model.device]):
        try:
            found: list[int] = model.generate(
                **inputs,
                custom_generate=loop_of(decoded, model, {**arguments, "streamer": streamer}),
                streamer=streamer,
                **arguments,
            )
        except _ReaderGone:
            return None
    return found


class _ReaderGone(Exception):
    """Breaks off a call whose reader is gone."""


class _Forwarder:
    """A streamer that passes the tokens of one text to `hear`."""

    def __init__(self, hear: Callable[[list[int]], bool]) -> None:
        self._hear = hear
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, and then token by token."""
        ids = value.flatten().tolist() if self._has_prompt else []
        self._has_prompt = True
        if not self._hear(ids):
            raise _ReaderGone

    def end(self) -> None:
        """Does nothing: the answer itself is the end."""


def inputs_on(prompt: PromptInputs, model: Any) -> dict[str, Any]:
    """The arguments of `generate()` that are the prompt, on the model's device."""
    if not isinstance(prompt, Mapping):
        ids = torch.tensor([list(prompt)], device=model.device)
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {
        name: each.to(model.device) if isinstance(each, torch.Tensor) else each
        for name, each in prompt.items()
    }
