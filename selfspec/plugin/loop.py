"""`Loop`: what transformers calls in place of a decoding loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from selfspec.compat.generation import (
    KV,
    belongs_to_caller,
    kv_of,
    runs_in_step,
)
from selfspec.errors import UnsupportedError
from selfspec.forward.model import num_readable
from selfspec.plugin.parts import as_ids, new_draft_model, predictions_of
from selfspec.plugin.refusals import CallArguments, Consequence, reason_for, refuse_prepared, route
from selfspec.plugin.spec import SelfSpec
from selfspec.prompt import Call, Prompt
from selfspec.row import Streamer, output_of
from selfspec.row_rules import length_limit
from selfspec.session import decode
from selfspec.stats import GenerationStats


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The loop of one call, for the argument `custom_generate`.

    It holds the arguments of the call that transformers hands to no loop.
    """

    spec: SelfSpec
    streamer: Streamer | None
    synced_gpus: bool
    draft_model: PreTrainedModel | str | None
    prediction: Any  # Token ids of one text for all prompts, or a list with those of one for each.
    max_nodes: int  # of the trees of this call
    is_default: bool = False  # Did the call not name the assistant?
    # Gets the call in place of decoding it.
    on_call: Callable[[Call], Any] | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """transformers hands over what this names; `inputs_tensor` is what an encoder has read."""
        start, spec, draft_model = perf_counter(), self.spec, None
        refuse_prepared(model, input_ids, generation_config, model_kwargs)
        if self.draft_model is not None:
            num_rows, num_tokens = input_ids.shape
            draft_model = new_draft_model(
                self.draft_model, model, num_rows, num_tokens, spec.runner
            )
        length = length_limit(stopping_criteria)
        num_returned = generation_config.num_return_sequences or 1
        call = Call(
            model=model,
            runner=spec.runner(model),
            input_ids=input_ids,
            model_kwargs=model_kwargs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=self.streamer,
            predictions=predictions_of(
                self.prediction, len(input_ids), num_returned, num_readable(model)
            ),
            draft_model=draft_model,
            max_nodes=self.max_nodes,
            max_length=generation_config.max_length if length is None else length,
            inputs_tensor=inputs_tensor,
            has_callers_cache=belongs_to_caller(kv_of(model_kwargs)),
            synced_gpus=self.synced_gpus,
            is_default=self.is_default,
            stats=GenerationStats(num_calls=1),
        )
        call.stats.spend("prepare", perf_counter() - start)
        if self.on_call is not None:
            return self.on_call(call)
        prompt = routed(call, spec)
        decode(prompt, spec)
        return _result_of(prompt)


def loop_for(
    spec: SelfSpec, model: PreTrainedModel, arguments: Mapping[str, Any]
) -> tuple[Loop, dict[str, Any]]:
    """The loop of a call, and the arguments that are left for transformers' `generate()`.

    Refuses what can't be served. A prediction has become token ids, and `stop_strings` a stopping
    criterion, unless the caller gave one. Without a tokenizer they stay, so that transformers
    raises its own error.
    """
    call = CallArguments(model, arguments)
    if reason := reason_for(Consequence.REFUSED, call):
        raise UnsupportedError(reason)
    ready = dict(arguments)
    tokenizer, draft_model = ready.pop("tokenizer", None), ready.pop("assistant_model", None)
    prediction, max_nodes = ready.pop("prediction", None), ready.pop("max_nodes", None)
    config = spec.config if max_nodes is None else spec.config.changed(max_nodes=max_nodes)
    if tokenizer is not None:
        prediction = as_ids(prediction, tokenizer)
        if strings := call.setting("stop_strings"):
            ready["stop_strings"] = None  # This keyword overrides the strings of all configs.
            criteria = list(ready.get("stopping_criteria") or ())
            if not any(type(criterion) is StopStringCriteria for criterion in criteria):
                criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
            ready["stopping_criteria"] = StoppingCriteriaList(criteria)
    loop = Loop(
        spec=spec,
        streamer=arguments.get("streamer"),
        synced_gpus=runs_in_step(model, arguments.get("synced_gpus")),
        draft_model=spec.draft_model if draft_model is None else draft_model,
        prediction=prediction,
        max_nodes=config.max_nodes,
    )
    return loop, ready


def routed(call: Call, spec: SelfSpec) -> Prompt:
    """Finds out how a call is decoded. A call that fails meanwhile is counted, too."""
    start = perf_counter()
    try:
        prompt = Prompt(**vars(call), route=route(call))
    except BaseException:
        spec.count(call)
        raise
    prompt.stats.spend("prepare", perf_counter() - start)
    return prompt


def _result_of(prompt: Prompt) -> Any:
    """The return value: that of transformers' own loop, or its like for drafted rows."""
    if prompt.route.support.mode == "plain":
        return prompt.result.output
    config, rows = prompt.generation_config, prompt.result.rows
    if not config.return_dict_in_generate:
        return output_of(rows)
    recorded: Any = rows[0].chooser
    has_encoder = prompt.model.config.is_encoder_decoder
    output: Any = (GenerateEncoderDecoderOutput if has_encoder else GenerateDecoderOnlyOutput)(
        sequences=output_of(rows),
        scores=tuple(recorded.scores) if config.output_scores else None,
        logits=tuple(recorded.logits) if config.output_logits else None,
        **{KV: prompt.result.kv},
    )
    output.stats = prompt.stats
    return output
