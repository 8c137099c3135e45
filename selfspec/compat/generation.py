"""What transformers keeps to itself of `generate()` and of chat templates, and what it renamed.

From 5.24 on the KV cache is `cache` in the arguments of `generate()`, in those of forwards and in
outputs; before, it was `past_key_values`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.chat_template_utils import _get_template_variables

# They belong to transformers. A new `AttentionInterface()` does not have what was set on the
# instance that models look into.
__all__ = ["ALL_ATTENTION_FUNCTIONS", "sdpa_attention_forward"]


class _Registered:
    """The functions of attention by their names, as models find them."""

    def __getitem__(self, name: str) -> Any:
        return ALL_ATTENTION_FUNCTIONS[name]

    def __setitem__(self, name: str, function: Any) -> None:
        AttentionInterface.register(name, function)


ATTENTION_FUNCTIONS = _Registered()

KV_NAMES = ("cache", "past_key_values")
_EXPERTS = "_experts_implementation"
_PLAIN = frozenset((bool, float, str, int, list, tuple, dict))  # The types of plain settings.


# The argument and the output field of this version that hold the KV cache.
KV = next(name for name in KV_NAMES if name in {x.name for x in fields(GenerateDecoderOnlyOutput)})


def kv_of(arguments: Mapping[str, Any]) -> Any:
    """The KV cache among a model's arguments or in its output; None if there is none."""
    return arguments.get(KV)


def kv_of_decoder(kv: Cache) -> Any:
    """The part of an encoder-decoder's KV cache that grows with the text; else the cache itself."""
    return kv.self_attention_cache if isinstance(kv, EncoderDecoderCache) else kv


def mask_of_text(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask of the columns that the decoder has read, or None.

    What an encoder-decoder calls its attention mask is that of the encoder.
    """
    of_two = isinstance(kv_of(arguments), EncoderDecoderCache)
    return arguments.get("decoder_attention_mask" if of_two else "attention_mask")


def belongs_to_caller(kv: Cache | None) -> bool:
    """Did the caller of `generate()` pass this KV cache?

    transformers marks it with a private attribute. Without the mark, each row of a batch would go
    on at its own pace, and the cache would end where its shortest row ends.
    """
    return bool(getattr(kv, "_is_user_defined", False))


def decode_plainly(model: PreTrainedModel, input_ids: torch.Tensor, **arguments: Any) -> Any:
    """The decoding loop of transformers, for calls that can't be drafted for.

    Once `generate()` has called our loop, there is no public way back to this one. Without it, such
    a call raises an AttributeError.
    """
    return type(model)._sample(model, input_ids, **arguments)


class _WithCandidates:
    """A model for one call of assisted decoding, which finds a candidate generator in it."""

    def __init__(self, model: PreTrainedModel, candidates: CandidateGenerator) -> None:
        self._model, self._candidates = model, candidates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def _get_candidate_generator(self, **_arguments: Any) -> CandidateGenerator:
        return self._candidates


def decode_assisted(
    model: PreTrainedModel,
    candidates: CandidateGenerator,
    input_ids: torch.Tensor,
    **arguments: Any,
) -> Any:
    """The assisted decoding of transformers, with candidates of ours.

    There is no argument for them. Without the two private names, an AttributeError is raised, or
    transformers asks a generator of its own.
    """
    return type(model)._assisted_decoding(
        _WithCandidates(model, candidates), input_ids, **arguments
    )


def runs_in_step(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """Must several processes run each forward together, as `generate()` decides it?

    `generate()` does not pass its decision to our loop. Without it, the processes would wait for
    each other without end.
    """
    arguments = model._extract_generation_mode_kwargs(None, {}, synced_gpus, None, None)
    return bool(arguments["synced_gpus"])


def update_arguments(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    *,
    num_new_tokens: int = 1,
    outputs: Any = None,
) -> dict[str, Any]:
    """The model's arguments with masks and positions for more tokens, as `generate()` makes them.

    Models override the method that does it. Without that method, chains and prompts can't be
    continued, and an AttributeError is raised.
    """
    updated: dict[str, Any] = model._update_model_kwargs_for_generation(
        {} if outputs is None else outputs,
        arguments,
        is_encoder_decoder=bool(model.config.is_encoder_decoder),  # Some models insist on it.
        num_new_tokens=num_new_tokens,
    )
    return updated


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    arguments: dict[str, Any],
) -> Any:
    """The model's outputs over a prompt, as `generate()` reads it, which may change `arguments`.

    It splits chunks and what belongs to them, and leaves out what a KV cache of the caller's holds.
    `generate()` does it in a private method. Without that, no prompt can be read.
    """
    return model._prefill(input_ids, generation_config, arguments, is_first_iteration=True)


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """The name of a model's attention. There is a public way to set it, but none to read it."""
    return getattr(config, "_attn_implementation", None)


def state_of_config(config: PreTrainedConfig, device: str) -> Hashable:
    """What a config says of how a model is run: its attention, its experts, and plain settings.

    On any `device` but a CPU, `generate()` runs experts by "batched_mm" while it decodes, where
    they are to be run by "grouped_mm". There both count as one, since another thread may look in
    the meantime. Without the private name, that thread would see another state.
    """
    settings = vars(config)
    experts = getattr(config, _EXPERTS, None)
    if experts == "grouped_mm" and device != "cpu":
        experts = "batched_mm"
    others = (value for name, value in settings.items() if not name.startswith(_EXPERTS))
    plain = [value for value in others if type(value) in _PLAIN]
    return getattr(config, "_attn_implementation", None), experts, repr(plain)


def functions_by_name(model: PreTrainedModel) -> dict[str, Any]:
    """The functions of attention and of experts that a model finds by name."""
    config = model.config.get_text_config(decoder=True)
    name = attention_implementation(config)
    functions = {
        "attention": ALL_ATTENTION_FUNCTIONS.get(name),
        "attention mask": ALL_MASK_ATTENTION_FUNCTIONS.get(name),
        "experts' function": ALL_EXPERTS_FUNCTIONS.get(getattr(config, _EXPERTS, None)),
    }
    return {what: function for what, function in functions.items() if function is not None}


def register_attention(name: str, function: Any) -> None:
    """Offers models an attention of ours, which takes the masks of ``"sdpa"``."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def keeps_a_state(model: PreTrainedModel) -> bool:
    """Does a model mix tokens by anything but attention? If nobody says so, it does not."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    others = any(not name.endswith("attention") or name.startswith("linear") for name in types)
    return others or bool(getattr(model, "_is_stateful", False))


def decoding_switches(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """What `generate()` switches while it decodes, for example the way that experts are run.

    Without it, the model gives the same text more slowly.
    """
    return model._optimize_model_for_decode()  # type: ignore[no-any-return]


def template_variables(owner: Any) -> frozenset[str]:
    """The variables in the chat template of a tokenizer or processor. With several, in all.

    Only these may be passed on from a client: a processor takes any other name as an argument of
    its own `apply_chat_template`, and would fetch what `images` names.
    """
    templates = owner.chat_template
    several = templates.values() if isinstance(templates, dict) else [templates]
    return frozenset.intersection(*map(_get_template_variables, several))
