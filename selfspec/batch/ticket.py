"""A prompt that waits or runs: its call, how much room it takes, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from selfspec.errors import UnsupportedError
from selfspec.machine.device import own_seed
from selfspec.plugin.arguments import for_drafts, loop_of
from selfspec.plugin.call import Call
from selfspec.plugin.rules import end_ids
from selfspec.plugin.spec import SelfSpec
from selfspec.run.probe import Ability
from selfspec.stats import GenerationStats

# Gets the index of a ticket and its new tokens; says whether anybody reads on.
Hear = Callable[[int, Sequence[int]], bool]

# Arguments of `generate()` that belong to one call with prompts of its own.
_OF_ONE_CALL = ("attention_mask", "custom_generate", "input_ids", "inputs_embeds", "streamer")


@dataclass(frozen=True)
class Answer:
    """What the model wrote behind one prompt.

    Attributes:
        index: Which prompt it is, counted from 0 in the order in which they were given.
        text: The new text, without special tokens.
        ids: The new tokens, the end-of-text token among them.
        finish_reason: ``"stop"`` if the model or a stop string ended the text, ``"length"`` if it
            was cut off at the most tokens.
        num_prompt_tokens: How many tokens the prompt has.
        stats: What was counted for this prompt. Of the time of a step, each row has an equal share.
    """

    index: int
    text: str
    ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    stats: GenerationStats


@dataclass(eq=False)  # Each one is itself, whatever it holds.
class Ticket:
    """One prompt, with the call that `generate()` would make of it."""

    index: int
    model: Any  # or what wraps it, as PEFT does
    ids: list[int]
    seed: int | None  # None where nothing is drawn.
    arguments: dict[str, Any]  # of `generate()`
    call: Call
    alone_reason: str | None  # Why it must be decoded with no other prompt beside it.

    @classmethod
    def of(
        cls,
        index: int,
        ids: Sequence[int],
        seed: int | None,
        model: Any,
        tokenizer: Any,
        spec: SelfSpec,
        arguments: dict[str, Any],
    ) -> Ticket:
        """Lets `generate()` prepare the call, up to where it would decode; runs no forward."""
        arguments = _prepared(arguments, model, tokenizer)

        @wraps(spec.open_call)  # transformers hands over what its signature names.
        def opened(*args: Any, **kwargs: Any) -> tuple[Call, Ability | str]:
            call = spec.open_call(*args, **kwargs)
            # A wrapper of PEFT changes the model until its generate() returns.
            return call, call.ability(spec.forwards)

        loop = loop_of(opened, model, arguments)
        call: Call
        call, ability = model.generate(**_inputs(ids, model), custom_generate=loop, **arguments)
        if len(call.input_ids) != 1:
            raise UnsupportedError(
                f"num_return_sequences must be 1 (got {len(call.input_ids)}); give the prompt "
                "several times"
            )
        if call.generation_config.do_sample:
            seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
            generator = torch.Generator(call.input_ids.device).manual_seed(seed)
            call = replace(call, generator=generator)
        if isinstance(ability, str):
            reason: str | None = ability
        else:
            reason = call.together_reason(ability, several=True)
        return cls(index, model, list(ids), seed, arguments, call, reason)

    @property
    def is_alone(self) -> bool:
        """Must it be decoded with no other prompt beside it?"""
        return self.alone_reason is not None

    @property
    def need(self) -> int:
        """How many columns of KV its row may come to need, the widest tree's among them."""
        return len(self.ids) + self.call.reach + self.call.width

    def decode_alone(self, spec: SelfSpec, hear: Hear | None = None) -> list[int] | None:
        """Decodes the prompt with a call of its own; returns the new tokens.

        `hear` gets each of them at once. If it says that nobody reads them, there is no answer.
        """
        model, device = self.model, self.call.input_ids.device
        told = None if hear is None else _Told(self.index, hear)
        with own_seed(self.seed, [device]):
            try:
                output = model.generate(
                    **_inputs(self.ids, model),
                    custom_generate=loop_of(spec, model, {**self.arguments, "streamer": told}),
                    streamer=told,
                    **self.arguments,
                )
            except _NobodyReads:
                return None
        return list(output[0, len(self.ids) :].tolist())

    def answer(self, ids: list[int], stats: GenerationStats, tokenizer: Any) -> Answer:
        """What came of it."""
        text = tokenizer.decode(ids, skip_special_tokens=True)
        reason = self._finish_reason(ids)
        return Answer(self.index, text, ids, reason, len(self.ids), stats)

    def _finish_reason(self, ids: list[int]) -> str:
        if ids and ids[-1] in end_ids(self.call.generation_config):
            return "stop"
        return "length" if len(self.ids) + len(ids) >= self.call.max_length else "stop"


class _NobodyReads(Exception):
    """Breaks off a call whose text nobody waits for."""


class _Told:
    """A streamer that hands on the tokens of one text."""

    def __init__(self, index: int, hear: Hear) -> None:
        self._index = index
        self._hear = hear
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt first, and then token by token."""
        ids = value.flatten().tolist() if self._has_prompt else []
        self._has_prompt = True
        if not self._hear(self._index, ids):
            raise _NobodyReads

    def end(self) -> None:
        """Does nothing: the answer says so."""


def _prepared(arguments: dict[str, Any], model: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments as `generate(..., assistant=)` would hand them on."""
    for name in _OF_ONE_CALL:
        if arguments.get(name) is not None:
            raise UnsupportedError(
                f"{name} belongs to one call of generate() and can't be used for many prompts; "
                "leave it out"
            )
    ours = {"tokenizer": tokenizer, "return_dict_in_generate": False}
    return for_drafts(model, {**arguments, **ours})


def _inputs(ids: Sequence[int], model: Any) -> dict[str, torch.Tensor]:
    input_ids = torch.tensor([list(ids)], device=model.device)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
