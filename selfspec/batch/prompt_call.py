"""The call that `generate()` would make of one of many prompts, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from selfspec.compat.generation import KV_NAMES, kv_of, with_kv
from selfspec.errors import UnsupportedError, kept
from selfspec.machine.device import own_seed
from selfspec.plugin.arguments import for_drafts, loop_of
from selfspec.plugin.call import Call
from selfspec.plugin.row_rules import end_ids
from selfspec.plugin.spec import SelfSpec
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
        cls,
        call: Call,
        ids: list[int],
        stats: GenerationStats,
        tokenizer: Any,
        error: Exception | None = None,
    ) -> Answer:
        """The answer that a call's new tokens are, to their end or to an error."""
        text, num_prompt_tokens = "", call.num_tokens
        try:
            text = tokenizer.decode(ids, skip_special_tokens=True)
        except Exception as fault:
            error = error or fault
        is_ended = bool(ids) and ids[-1] in end_ids(call.generation_config)
        is_cut = not is_ended and num_prompt_tokens + len(ids) >= call.max_length
        reason = "error" if error is not None else "length" if is_cut else "stop"
        kept_error = None if error is None else kept(error)
        return cls(call.index, text, ids, reason, num_prompt_tokens, stats, kept_error)

    @classmethod
    def refused(cls, index: int, error: Exception) -> Answer:
        """The answer to a prompt of which no call could be made."""
        return cls(index, "", [], "error", 0, GenerationStats(), kept(error))


def call_for(
    index: int,
    prompt: PromptInputs,
    seed: int | None,
    model: Any,  # or what wraps it, as PEFT does
    tokenizer: Any,
    spec: SelfSpec,
    arguments: dict[str, Any],
) -> Call:
    """Lets `generate()` prepare the call, up to where it would decode; runs no forward.

    Of a prompt with images, transformers encodes the images here, from 5.24 on.
    """
    for name in _OF_ONE_CALL:
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"{name} belongs to one call of generate() and can't be used for many prompts; "
                "leave it out"
            )
    ours = {"tokenizer": tokenizer, "return_dict_in_generate": False}
    arguments = for_drafts(model, {**arguments, **ours})

    @wraps(spec.open_call)  # transformers hands over what its signature names.
    def opened(*args: Any, **kwargs: Any) -> tuple[Call, str | None]:
        call = spec.open_call(*args, **kwargs)
        # A wrapper of PEFT changes the model until its generate() returns.
        return call, call.plain_reason or call.together_reason(several=True)

    loop = loop_of(opened, model, arguments)
    call: Call
    inputs = _inputs(prompt, model)
    call, alone_reason = model.generate(**inputs, custom_generate=loop, **arguments)
    if len(call.input_ids) != 1:
        raise UnsupportedError(
            f"num_return_sequences must be 1, since each prompt gets one answer (got "
            f"{len(call.input_ids)}); give the prompt several times"
        )
    if call.generation_config.do_sample:
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        call.generator = torch.Generator(call.input_ids.device).manual_seed(seed)
    call.index, call.alone_reason, call.fails_alone = index, alone_reason, True
    if alone_reason is not None:  # Its own call makes the others anew; images may be large.
        call.model_kwargs = with_kv(kv_of(call.model_kwargs))
    call.decode_alone = partial(_decode_alone, spec, model, inputs, seed, arguments)
    return call


def _decode_alone(
    spec: SelfSpec,
    model: Any,
    inputs: dict[str, Any],
    seed: int | None,
    arguments: dict[str, Any],
    hear: Callable[[list[int]], bool],
) -> tuple[list[int], GenerationStats] | None:
    """Decodes the prompt with a `generate()` call of its own; returns new tokens and statistics.

    `hear` gets each token at once. None if it says that its reader is gone.
    """
    streamer = _Forwarder(hear)

    @wraps(spec.open_call)
    def decoded(*args: Any, **kwargs: Any) -> tuple[Any, Call]:
        call = spec.open_call(*args, **kwargs)
        return spec.decode(call), call

    with own_seed(seed, [model.device]):
        try:
            output, call = model.generate(
                **inputs,
                custom_generate=loop_of(decoded, model, {**arguments, "streamer": streamer}),
                streamer=streamer,
                **arguments,
            )
        except _ReaderGone:
            return None
    return output[0, call.num_tokens :].tolist(), call.stats


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


def _inputs(prompt: PromptInputs, model: Any) -> dict[str, Any]:
    """The arguments of `generate()` that are the prompt, on the model's device."""
    if not isinstance(prompt, Mapping):
        ids = torch.tensor([list(prompt)], device=model.device)
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {
        name: each.to(model.device) if isinstance(each, torch.Tensor) else each
        for name, each in prompt.items()
    }
