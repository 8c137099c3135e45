"""One table of what is not served as asked: what a rule looks at, what becomes of a call, and why.

The table of docs/works-with.md names the same things. Rules read objects of transformers and run
nothing, but for those that ask for the trial of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin

from selfspec.ability.families import changes_other_rows, rope_limit
from selfspec.ability.look import look_at
from selfspec.ability.probe import DraftSupport
from selfspec.compat.generation import kv_of
from selfspec.compat.modules import is_parallel, prompt_learning
from selfspec.config import ROUNDED
from selfspec.errors import UnsupportedError
from selfspec.forward.inputs import foreign_layer, missing_inputs_reason
from selfspec.prompt import Call, Route, SeenCall
from selfspec.row_rules import are_row_wise, row_stops


class Consequence(Enum):
    REFUSED = "an error, with the fix"
    ASIDE = "a default assistant leaves it to transformers; one that is named goes on"
    PLAIN = "decoded plainly, with the reason in the statistics"
    MOVES_TOGETHER = "its rows get each token at once, as in the loop of transformers"
    MOVES_TOGETHER_IF_SEVERAL = "the same, if there are other rows in its forwards"


class CallArguments(NamedTuple):
    """The arguments of a `generate()` call, before transformers has prepared them."""

    model: PreTrainedModel
    arguments: Mapping[str, Any]
    draft_model: Any = None  # of the assistant

    def setting(self, name: str) -> Any:
        """The argument, else what the config of the call says, else that of the model."""
        if name in self.arguments:
            return self.arguments[name]
        configs = (self.arguments.get("generation_config"), self.model.generation_config)
        values = (getattr(config, name, None) for config in configs)
        return next((value for value in values if value is not None), None)


class Rule(NamedTuple):
    """Applies if `looks_at(call)` is truthy; its value is formatted into `reason`.

    `looks_at` gets `CallArguments` before transformers has prepared a call, and then a `SeenCall`.
    """

    looks_at: Callable[[Any], Any]
    reason: str = "{}"


def reason_for(consequence: Consequence, call: Any) -> str | None:
    """The reason of the first rule with this consequence; None if no rule applies."""
    for rule in RULES[consequence]:
        if value := rule.looks_at(call):
            return rule.reason.format(value)
    return None


def refuse_prepared(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Refuses a call for what `generate()` has prepared, where its arguments did not show it."""
    if overrides_generate(model):  # Its generate() may change what is asked for.
        call = CallArguments(model, vars(generation_config))
        if reason := reason_for(Consequence.REFUSED, call):
            raise UnsupportedError(reason)
    if not input_ids.shape[1] and model_kwargs.get("inputs_embeds") is None:
        raise UnsupportedError(  # A model would fail somewhere inside.
            "the prompt must have at least one token (got none); write some text, or begin "
            "with the tokenizer's bos_token"
        )


def route(call: Call) -> Route:
    """How a call is decoded. Finding it out may take a trial of the model."""
    seen = SeenCall(**vars(call), look=look_at(call.model))
    reason = reason_for(Consequence.PLAIN, seen)
    if reason is not None:
        return Route(seen.look, DraftSupport("plain", reason, None), alone_reason=reason)
    together = reason_for(Consequence.MOVES_TOGETHER, seen)
    alone = together or reason_for(Consequence.MOVES_TOGETHER_IF_SEVERAL, seen)
    has_other_rows = len(call.input_ids) > 1
    return Route(seen.look, seen.support, alone, alone if has_other_rows else together)


def _mode(name: str, what: str, off: Any) -> Rule:
    """Refuses a call with a setting that asks for something else than one token after the other."""
    fix = f"set {name}={off!r} or leave assistant= out"
    reason = f"{what} can't be drafted for; {fix} (got {name}={{!r:.80}})"

    def looks_at(call: Any) -> Any:
        value = call.setting(name)
        return value if value and value != off else None

    return Rule(looks_at, reason)


def overrides_generate(model: PreTrainedModel) -> bool:
    """Does the class bring a `generate()` that may do with our loop what it likes?

    That of a PEFT wrapper is known: it passes everything on to the model inside.
    """
    is_wrapper = hasattr(model, "get_base_model")
    of_class = getattr(type(model), "generate", None)  # A wrapper may find it elsewhere.
    return not is_wrapper and of_class is not GenerationMixin.generate


def _num_processes() -> int:
    distributed = torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if there else 1


def _lacks_ids_for_draft_model(call: CallArguments) -> bool:
    # Without any prompt, transformers makes one of the first token.
    has_embeds = call.arguments.get("inputs_embeds") is not None
    has_ids = any(call.arguments.get(name) is not None for name in ("inputs", "input_ids"))
    reads_prompt = call.draft_model not in (None, *ROUNDED)
    return reads_prompt and has_embeds and not has_ids


def _other_kv(call: SeenCall) -> str | None:
    cache = kv_of(call.model_kwargs)
    is_of_two = type(cache) is EncoderDecoderCache
    parts = (cache.self_attention_cache, cache.cross_attention_cache) if is_of_two else (cache,)
    if all(type(part) is DynamicCache and not part.offloading for part in parts):
        return None
    cache = parts[0]
    offloaded = "offloaded " if getattr(cache, "offloading", False) else ""
    return f"{offloaded}{type(cache).__name__}"


def _tensors_of_plain_steps(call: SeenCall) -> str | None:
    names = ("output_attentions", "output_hidden_states")
    if not call.setting("return_dict_in_generate"):
        return None
    return next((name for name in names if call.setting(name)), None)


def _verifies(mode: str) -> Callable[[Any], str | None]:
    return lambda call: call.support.reason if call.support.mode == mode else None


def _records_scores(call: SeenCall) -> bool:
    records = call.setting("output_scores") or call.setting("output_logits")
    return bool(call.setting("return_dict_in_generate") and records)


def _looks_at_columns(call: SeenCall) -> bool:
    attention = call.support.attention
    return attention is None or attention.scale_period > 0


RULES: dict[Consequence, tuple[Rule, ...]] = {
    Consequence.REFUSED: (
        _mode("num_beams", "beam search", 1),
        _mode("penalty_alpha", "contrastive search", None),
        _mode("dola_layers", "DoLa", None),
        _mode("constraints", "constrained beam search", None),
        _mode("force_words_ids", "constrained beam search", None),
        _mode("prompt_lookup_num_tokens", "prompt lookup", None),
        _mode("assistant_early_exit", "early exit", None),
        _mode("speculation_type", "DFlash", None),
        _mode("assistant_ensemble_weight", "ensemble verification", None),
        _mode("assistant_tokenizer", "a draft model with a tokenizer of its own", None),
        _mode("use_mtp", "drafting by heads alone", False),
        _mode("token_healing", "token healing", False),
        Rule(
            lambda call: call.setting("cache_implementation") == "paged",
            "cache_implementation='paged' can't be drafted for: a paged KV cache takes no draft "
            "back; leave it out, or call generate() without selfspec",
        ),
    ),
    Consequence.ASIDE: (
        Rule(
            lambda call: overrides_generate(call.model) and type(call.model).__name__,
            "{} has a generate() of its own",
        ),
        Rule(
            lambda call: call.arguments.get("assistant_model") is not None,
            "assistant_model= names another assistant",
        ),
        Rule(
            lambda call: call.arguments.get("synced_gpus") or _num_processes() > 1,
            "several processes may have to run their forwards in step",
        ),
        Rule(_lacks_ids_for_draft_model, "a draft model must be given the prompt as token ids"),
    ),
    Consequence.PLAIN: (
        Rule(
            lambda call: call.synced_gpus,
            "synced_gpus=True lets several processes run their forwards in step",
        ),
        Rule(
            lambda call: is_parallel(call.model),
            "it is spread over several processes, each of which would choose a width of its own",
        ),
        Rule(
            lambda call: prompt_learning(call.model),
            "prompt learning puts tokens into the KV cache that generate() does not count",
        ),
        Rule(
            lambda call: rope_limit(call.model.config, call.max_new_columns, call.model_kwargs),
            "its {0[0]} rotary embedding changes with the length of a forward beyond {0[1]}",
        ),
        Rule(
            lambda call: not call.model_kwargs.get("use_cache", True),
            "use_cache=False leaves no KV cache to verify a draft with",
        ),
        Rule(
            lambda call: kv_of(call.model_kwargs) is None and type(call.model).__name__,
            "{} keeps a state of its own in place of a KV cache, as recurrent models do, and a "
            "draft can't be taken back from it",
        ),
        Rule(_other_kv, "a KV cache of type {} can't take a draft back"),
        Rule(_tensors_of_plain_steps, "{}=True asks for the tensors of each plain step"),
        Rule(_verifies("plain")),
        Rule(lambda call: call.support.mode == "tree" and foreign_layer(kv_of(call.model_kwargs))),
        Rule(lambda call: missing_inputs_reason(call.model, call.input_ids, call.model_kwargs)),
    ),
    Consequence.MOVES_TOGETHER: (
        Rule(_verifies("chain")),
        Rule(
            lambda call: row_stops(call.stopping_criteria) is None,
            "its stopping criteria look at more than their own row",
        ),
        Rule(_records_scores, "its scores or logits are recorded"),
    ),
    Consequence.MOVES_TOGETHER_IF_SEVERAL: (
        Rule(_looks_at_columns, "the model's attention depends on the columns of a batch"),
        Rule(
            lambda call: changes_other_rows(call.model.config, call.model_kwargs),
            "the model's positions depend on the longest row",
        ),
        Rule(lambda call: call.gives_cache_back, "its KV cache is given back"),
        Rule(
            lambda call: not are_row_wise(call.logits_processor),
            "a logits processor may look at other rows",
        ),
    ),
}
