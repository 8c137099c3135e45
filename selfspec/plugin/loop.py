"""`Loop`: what transformers calls in place of a decoding loop of its own."""

from __future__ import annotations

from collections.abc import Callable
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

from selfspec.compat.generation import belongs_to_caller, kv_of, mark_callers_cache
from selfspec.draft.sources.prediction import Prediction
from selfspec.forward.model import num_readable
from selfspec.plugin.arguments import LoopArguments, predictions_of
from selfspec.plugin.draft_pair import new_draft_model
from selfspec.plugin.outcome import result_of
from selfspec.plugin.refusals import refuse_prepared, route
from selfspec.plugin.spec import SelfSpec
from selfspec.prompt import Prompt
from selfspec.session import write
from selfspec.stats import GenerationStats


@dataclass(frozen=True)
class Loop:
    """The loop of one call, for the argument `custom_generate`.

    `is_default` says that the call did not name the assistant. `then` gets the prompt before
    anybody knows how it is decoded; without it, its texts are written and returned.
    """

    spec: SelfSpec
    arguments: LoopArguments
    is_default: bool = False
    then: Callable[[Prompt], Any] | None = None

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
        start = perf_counter()
        spec, arguments = self.spec, self.arguments
        refuse_prepared(model, input_ids, generation_config, model_kwargs)
        predictions: list[Prediction | None] = [None] * len(input_ids)
        if arguments.prediction is not None:
            num_returned = generation_config.num_return_sequences or 1
            sizes = (len(input_ids), num_returned, num_readable(model))
            predictions = predictions_of(arguments.prediction, *sizes)
        draft_model = spec.draft_model if arguments.draft_model is None else arguments.draft_model
        if draft_model is not None:
            num_tokens = input_ids.shape[1]
            draft_model = new_draft_model(draft_model, model, num_tokens, spec.models)
        config = spec.config
        if arguments.max_nodes is not None:
            config = config.changed(max_nodes=arguments.max_nodes)
        mark_callers_cache(model, kv_of(model_kwargs))
        prompt = Prompt(
            model=model,
            runner=spec.models.run(model),
            input_ids=input_ids,
            model_kwargs=model_kwargs,
            generation_config=generation_config,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=arguments.streamer,
            predictions=predictions,
            draft_model=draft_model,
            max_nodes=config.max_nodes,
            inputs_tensor=inputs_tensor,
            has_callers_cache=belongs_to_caller(kv_of(model_kwargs)),
            synced_gpus=arguments.synced_gpus,
            is_default=self.is_default,
            stats=GenerationStats(num_calls=1),
        )
        prompt.stats.spend("prepare", perf_counter() - start)
        if self.then is not None:
            return self.then(prompt)
        write(routed(prompt, spec), spec)
        return result_of(prompt)


def routed(prompt: Prompt, spec: SelfSpec) -> Prompt:
    """The prompt, once it is known how it is decoded; a call that fails meanwhile is counted."""
    start = perf_counter()
    try:
        route(prompt)
    except BaseException:
        spec.count(prompt)
        raise
    prompt.stats.spend("prepare", perf_counter() - start)
    return prompt
