"""The arguments of a `generate()` call, made ready for a loop of our own.

transformers hands such a loop neither the tokenizer nor the assistant model. What needs them is
replaced before, in this one place: for `attach`, for the Hub's `generate()`, and for each of many
prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from selfspec.errors import UnsupportedError
from selfspec.plugin.prediction import encoded_prediction


def for_drafts(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """New arguments, with which stock's `generate()` may call the loop; refuses what can't be had.

    A draft model is named `draft_model`, a prediction is ids, and `stop_strings` are the criterion
    that stock makes of them. Without a tokenizer they stay, so that stock's own error comes.
    """
    if rule := unpassable(model, arguments):
        raise UnsupportedError(rule)
    if (other := arguments.get("assistant_tokenizer")) is not None:
        raise UnsupportedError(
            "assistant_tokenizer= must be left out, since a draft model has the tokenizer of the "
            f"model (got a {type(other).__name__}); or call generate() without assistant="
        )
    ready = dict(arguments)
    if (draft_model := ready.pop("assistant_model", None)) is not None:
        ready["draft_model"] = draft_model
    tokenizer = ready.pop("tokenizer", None)
    if tokenizer is None:
        return ready
    if ready.get("prediction") is not None:
        ready["prediction"] = encoded_prediction(ready["prediction"], tokenizer)
    if strings := setting(model, arguments, "stop_strings"):
        ready["stop_strings"] = None  # A keyword goes before what any config says.
        given = ready.get("stopping_criteria") or ()
        criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
        ready["stopping_criteria"] = StoppingCriteriaList([*given, criterion])
    return ready


def setting(model: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """What stock takes: the argument, else the config of the call, else that of the model."""
    if name in arguments:
        return arguments[name]
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def unpassable(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """The rule that arguments break before any loop could see them, with the fix; else None."""
    if arguments.get("cache_implementation") == "paged":
        return (
            "cache_implementation='paged' can't be drafted for: a paged KV cache takes no draft "
            "back; leave it out, or call generate() without selfspec"
        )
    if setting(model, arguments, "token_healing"):
        return (
            "token_healing=True needs the tokenizer, which a custom decoding loop is not given; "
            "pass input_ids=model.heal_tokens(input_ids, tokenizer) instead"
        )
    return None


def argument_of_generate(name: str) -> Any:
    """An argument of the `generate()` that called whoever asks.

    transformers hands a `custom_generate` callable neither the streamer nor the assistant model,
    and without the streamer a reader in another thread would wait for ever.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get(name) if frame.f_code.co_name == "generate" else None
