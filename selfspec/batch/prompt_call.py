"""The call that `generate()` would make of one of many prompts, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch

from selfspec.batch.token_scores import TokenScore, TokenScores
from selfspec.compat.generation import KV, KV_NAMES, kv_of
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

# Gets the index of a prompt and a token of its answer. Returns False if the reader is gone.
OnToken = Callable[[int, Sequence[int]], bool]

# Arguments of `generate()` that make sense for one call only.
_OF_ONE_CALL = (
    *("attention_mask", "custom_generate", "input_ids", "inputs_embeds", "streamer"),
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
        stats: What was counted for this prompt. Rows that share a step share its time equally.
        error: The exception that has ended the text, or why the prompt was refused; its traceback
            is the text of its cause. None: all went well.
        logprobs: The `TokenScore` of each new token, where they were asked for.
        prompt_logprobs: The same of the prompt.
    """

    index: int
    text: str
    ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    stats: GenerationStats
    error: Exception | None = None
    logprobs: list[TokenScore] | None = None
    prompt_logprobs: list[TokenScore] | None = None

    @classmethod
    def to(
        cls, asked: PromptCall, ids: list[int], tokenizer: Any, error: Exception | None = None
    ) -> Answer:
        call, text, num_prompt_tokens = asked.call, "", asked.call.num_tokens
        ids = [] if asked.writes_nothing else ids
        try:
            text = tokenizer.decode(ids, skip_special_tokens=True)
        except Exception as fault:
            error = error or fault
        is_ended = bool(ids) and ids[-1] in end_ids(call.generation_config)
        is_full = asked.writes_nothing or num_prompt_tokens + len(ids) >= call.max_length
        reason = "length" if is_full and not is_ended else "stop"
        reason = reason if error is None else "error"
        told = (None if error is None else kept(error), *asked.scores.lists)
        return cls(asked.index, text, ids, reason, num_prompt_tokens, call.stats, *told)

    @classmethod
    def refused(cls, index: int, error: Exception) -> Answer:
        """The answer to a prompt of which no call could be made."""
        return cls(index, "", [], "error", 0, GenerationStats(), kept(error))


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptCall:
    """One of many prompts, and how it is answered: with others, or in a call of its own.

    `alone_reason` says why it can't share forwards. If it can, the engine gets `request`. If not,
    `decode_alone` returns the new tokens, and the error that broke them off, if one did. A call
    that only scores its prompt `writes_nothing`: its one token is dropped.
    """

    index: int
    call: Call
    alone_reason: str | None
    request: Request | None
    decode_alone: Callable[[], tuple[list[int], Exception | None]]
    scores: TokenScores
    writes_nothing: bool

    @property
    def max_columns(self) -> int:
        return self.call.max_columns


def call_for(
    index: int,
    prompt: PromptInputs,
    seed: int | None,
    model: Any,  # It may be a wrapper of PEFT.
    tokenizer: Any,
    spec: SelfSpec,
    arguments: dict[str, Any],
    on_token: OnToken | None,
    scope: Hashable = None,
) -> PromptCall:
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
    numbers = (arguments.pop(name, None) for name in ("logprobs", "prompt_logprobs"))
    scores = TokenScores(tokenizer, *numbers)
    if writes_nothing := arguments.get("max_new_tokens") == 0 and scores.prompt is not None:
        arguments["max_new_tokens"] = 1
    listener = _Listener(index, on_token, scores, writes_nothing)
    generated = partial(_generated, model, inputs_on(prompt, model), arguments)
    asked: dict[str, Any] = {"scores": scores} if scores.is_asked else {}

    @wraps(spec.open_call)  # transformers hands over what its signature names.
    def routed(*args: Any, **kwargs: Any) -> tuple[Call, str | None]:
        call = spec.open_call(*args, **{**kwargs, **asked})
        # A wrapper of PEFT changes the model until its generate() returns.
        return call, call.route.alone

    call: Call
    is_heard = on_token is not None or scores.is_asked
    call, alone_reason = generated(routed, listener if is_heard else None)
    if scores.prompt is not None:
        _check_scored(call)
        scores.prompt_ids = call.input_ids[0].tolist()
    if len(call.input_ids) != 1:
        raise UnsupportedError(
            f"num_return_sequences must be 1, since each prompt gets one answer (got "
            f"{len(call.input_ids)}); give the prompt several times"
        )
    generator, device = None, call.input_ids.device
    if call.generation_config.do_sample:
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        generator = torch.Generator(device).manual_seed(seed)
    request = None
    if alone_reason is None:
        request = request_of(call, index=index, generator=generator, fails_alone=True, scope=scope)
    else:  # Its own call prepares the rest anew, and images would take memory until then.
        call = replace(call, model_kwargs={KV: kv_of(call.model_kwargs)})
    return PromptCall(
        index=index,
        call=call,
        alone_reason=alone_reason,
        request=request,
        decode_alone=partial(
            _decode_alone, generated, spec, listener, {"stats": call.stats, **asked}, seed, device
        ),
        scores=scores,
        writes_nothing=writes_nothing,
    )


def _check_scored(call: Call) -> None:
    """Refuses to score a prompt that is not read as we read prompts."""
    why = call.route.reason if call.route.mode == "plain" else None
    if call.model.config.is_encoder_decoder:
        why = "its prompt is read by an encoder"
    elif call.setting("prefill_chunk_size") is not None:
        why = "prefill_chunk_size is set"
    if why is not None:
        raise UnsupportedError(
            f"prompt_logprobs (echo with logprobs) must be left out here ({why})"
        )


def _generated(
    model: Any,
    inputs: dict[str, Any],
    arguments: dict[str, Any],
    loop: Any,
    streamer: Streamer | None,
) -> Any:
    """What `loop` makes of the call that `generate()` prepares for a prompt."""
    loop = loop_of(loop, model, {**arguments, "streamer": streamer})
    return model.generate(**inputs, custom_generate=loop, **arguments)


def _decode_alone(
    generated: Callable[[Any, Streamer], Any],
    spec: Any,  # mypy can't call what `wraps` made.
    listener: _Listener,
    asked: dict[str, Any],
    seed: int | None,
    device: torch.device,
) -> tuple[list[int], Exception | None]:
    with own_seed(seed, [device]):
        try:
            generated(partial(spec, **asked), listener)
        except Exception as error:
            return listener.ids, error
    return listener.ids, None


class ReaderGone(Exception):
    """Ends a text that nobody reads any more."""


class _Listener:
    """A streamer that keeps and hands on each token of one text, and ends it if nobody reads on."""

    def __init__(
        self, index: int, on_token: OnToken | None, scores: TokenScores, is_deaf: bool
    ) -> None:
        self.ids: list[int] = []
        self._index = index
        self._on_token = on_token
        self._scores = scores
        self._is_deaf = is_deaf

    def put(self, value: torch.Tensor) -> None:
        ids = value.tolist()
        self.ids += ids
        if self._is_deaf:
            return
        self._scores.take(ids)
        if self._on_token is not None and not self._on_token(self._index, ids):
            raise ReaderGone

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
