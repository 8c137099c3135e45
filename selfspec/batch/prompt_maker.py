"""`PromptMaker`: from ids and the arguments of `generate()` to a `Prompt` for a session."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from selfspec.batch.answers import OnTokens, TokenScores, TokenStreamer
from selfspec.batch.guides import Guides
from selfspec.compat.generation import KV_NAMES
from selfspec.compat.modules import inside_wrappers
from selfspec.errors import UnsupportedError, VocabularyError
from selfspec.plugin.loop import loop_for, routed
from selfspec.plugin.spec import SelfSpec
from selfspec.prompt import Call, Prompt

# Token ids, or what a processor made of a prompt: `input_ids` and what belongs to them.
PromptInputs = Sequence[int] | Mapping[str, Any]

# Arguments of `generate()` that make sense for one call only.
_OF_ONE_CALL = (
    *("attention_mask", "custom_generate", "input_ids", "inputs_embeds", "streamer"),
    *KV_NAMES,
)


class PromptMaker:
    """Makes of each prompt the call that `generate()` would make of it.

    A prompt has rules and random numbers of its own. Once a first prompt was made, any thread may
    ask.
    """

    def __init__(self, model: Any, tokenizer: Any, spec: SelfSpec) -> None:
        self._model = model  # Possibly a wrapper of PEFT.
        self.tokenizer = tokenizer
        self._spec = spec
        self._guides = Guides(tokenizer, inside_wrappers(model))

    def prompt(
        self,
        index: int,
        inputs: PromptInputs,
        seed: int | None,
        arguments: Mapping[str, Any],
        scope: Hashable = None,
        on_tokens: OnTokens | None = None,
    ) -> Prompt:
        """A prompt with the arguments that `generate()` would get; `index` names it.

        With learning="request", it shares what was read with prompts of the same `scope`.
        `on_tokens` gets the tokens of its answer as they come.

        Refuses what `generate()` would refuse. Runs no forward, but for images, which transformers
        encodes here from 5.24 on, and for what an encoder reads.
        """
        if not inputs:
            raise UnsupportedError("a prompt must have at least one token (got none)")
        if not isinstance(inputs, Mapping):
            self._check_ids(inputs)
        for name in _OF_ONE_CALL:
            if arguments.get(name) is not None:
                raise UnsupportedError(
                    f"{name} belongs to one call of generate() and can't be used for many prompts; "
                    "leave it out"
                )
        ours = {"tokenizer": self.tokenizer, "return_dict_in_generate": False}
        applied = {**self._guides.applied(**arguments), **ours}
        loop, ready = loop_for(self._spec, self._model, applied)
        numbers = (ready.pop(name, None) for name in ("logprobs", "prompt_logprobs"))
        scores = TokenScores(self.tokenizer, *numbers)
        is_streamed = on_tokens is not None or scores.is_wanted
        streamer = TokenStreamer(on_tokens, scores) if is_streamed else None
        on_logits = None if scores.prompt is None else scores.on_logits
        fields = {"index": index, "scope": scope, "scores": scores, "on_logits": on_logits}
        loop = replace(loop, streamer=streamer, on_call=partial(self._routed, seed, fields))
        ids = inputs_on(inputs, self._model)
        prompt: Prompt = self._model.generate(**ids, custom_generate=loop, **ready)
        if prompt.route.support.mode == "plain" and self._model is not prompt.model:
            # What a wrapper of PEFT changes lasts until its generate() returns.
            raise UnsupportedError(
                f"a model in a wrapper of PEFT must be drafted for among many prompts (got: "
                f"{prompt.route.support.reason}); call generate() for each prompt"
            )
        if scores.is_wanted:
            prompt.logits_processor.insert(0, scores)
        if scores.prompt is not None:
            _check_scored(prompt)
            scores.prompt_ids = prompt.input_ids[0].tolist()
        return prompt

    def _routed(self, seed: int | None, fields: Mapping[str, Any], call: Call) -> Prompt:
        """The prompt of a call that is one among many, with the fields that say so."""
        if len(call.input_ids) != 1:
            raise UnsupportedError(
                f"num_return_sequences must be 1, since each prompt gets one answer (got "
                f"{len(call.input_ids)}); give the prompt several times"
            )
        if not call.generation_config.do_sample:
            seed = None
        elif seed is None:
            seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        return routed(replace(call, seed=seed, fails_alone=True, **fields), self._spec)

    def _check_ids(self, ids: Sequence[int]) -> None:
        embeddings = inside_wrappers(self._model).get_input_embeddings()
        num_known = getattr(embeddings, "num_embeddings", max(ids) + 1)
        if not 0 <= min(ids) <= max(ids) < num_known:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise VocabularyError(
                f"a prompt must have ids of the model's {num_known} tokens (got {wrong}); give the "
                "model's own tokenizer"
            )


def _check_scored(prompt: Prompt) -> None:
    """Refuses to score a prompt that is not read as we read prompts."""
    why = prompt.route.support.reason if prompt.route.support.mode == "plain" else None
    if prompt.model.config.is_encoder_decoder:
        why = "its prompt is read by an encoder"
    elif prompt.setting("prefill_chunk_size") is not None:
        why = "prefill_chunk_size is set"
    if why is not None:
        raise UnsupportedError(
            f"prompt_logprobs (echo with logprobs) must be left out here ({why})"
        )


def inputs_on(inputs: PromptInputs, model: Any) -> dict[str, Any]:
    """The arguments of `generate()` that are the prompt, on the model's device."""
    if not isinstance(inputs, Mapping):
        ids = torch.tensor([list(inputs)], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
