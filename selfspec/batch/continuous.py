"""`generate_batch()` of an attached model: a session, in place of continuous batching.

Programs such as trl call it for rollouts. The answers are those of `generate_many`: prompts that
begin alike are read once, and texts of one prompt draft from each other.
"""

from __future__ import annotations

import copy
import inspect
from time import perf_counter
from typing import Any

from transformers.utils import logging as hf_logging

from selfspec.batch.many import answers
from selfspec.batch.prompt_maker import PromptMaker
from selfspec.compat.generation import BatchOutput, RequestStatus, generate_batch_of_class
from selfspec.errors import UnsupportedError
from selfspec.plugin.spec import SelfSpec
from selfspec.session import Session


def generate_batch(model: Any, spec: SelfSpec, *args: Any, **kwargs: Any) -> dict[str, BatchOutput]:
    """What `generate_batch()` of transformers returns for the same arguments.

    Refuses what only transformers can answer, before any text is written.
    """
    bound = inspect.signature(generate_batch_of_class).bind(model, *args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    config = copy.copy(call["generation_config"] or model.generation_config)
    num_texts, config.num_return_sequences = config.num_return_sequences or 1, 1
    limit = call["kwargs"].get("max_new_tokens") or config.max_new_tokens
    if reason := _reason(call, limit, spec.runner(model).support().mode):
        raise UnsupportedError(f"generate_batch() is not drafted for, since {reason}")
    prompts = [list(ids) for ids in call["inputs"] for _ in range(num_texts)]
    start, outputs = perf_counter(), dict[int, BatchOutput]()
    model.eval()  # transformers' call leaves it so, too.
    session, maker = Session(spec.runner(model), spec), PromptMaker(model, None, spec)
    options = {"generation_config": config, "max_new_tokens": limit}
    texts = answers(session, maker, None, prompts, None, options)
    for answer in hf_logging.tqdm(texts, total=len(prompts), disable=not call["progress_bar"]):
        error = answer.error
        outputs[answer.index] = BatchOutput(
            request_id=_name(answer.index, num_texts),
            prompt_ids=prompts[answer.index],
            generated_tokens=answer.ids,
            error=None if error is None else str(error),
            status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
            created_time=start,
            lifespan=(start, perf_counter()),
        )
    return {outputs[index].request_id: outputs[index] for index in sorted(outputs)}


def _reason(call: dict[str, Any], limit: int | None, mode: str) -> str | None:
    """Why transformers has to answer a call itself."""
    if mode != "tree":
        return "prompts of this model can't share forwards over drafts"
    if limit is None:
        return "max_new_tokens is not set"
    if call["record_timestamps"]:
        return "record_timestamps=True asks for the time of each token"
    if getattr(call["continuous_batching_config"], "return_logprobs", False):
        return "its config asks for log probabilities"
    return None


def _name(index: int, num_texts: int) -> str:
    """The name of a text as transformers gives it: the last text of a prompt is the parent."""
    prompt, text = divmod(index, num_texts)
    return f"req_{prompt}" + (f"__child#{text}" if text < num_texts - 1 else "")
