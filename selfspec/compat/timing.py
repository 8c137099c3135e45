"""When `generate()` has read its prompt, and when it compiles: for measurements of it.

The names are private to transformers. selfspec itself needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from selfspec.compat.generation import KV


@contextmanager
def told_of_prompt(model: PreTrainedModel, tell: Callable[[], None]) -> Iterator[None]:
    """Inside, `tell` is called when the first call of `generate()` has read its prompt.

    After the prompt's forward, every loop updates the arguments of the next one with its outputs;
    assisted decoding has read the prompt with its first forward. A hook on the model in any other
    case would be seen by what captures forwards, and all of them would be run eagerly. Without
    these names, prompts are not timed apart.
    """
    update, assist = model._update_model_kwargs_for_generation, model._get_candidate_generator
    is_over = False

    def end() -> None:
        nonlocal is_over
        is_over = True
        tell()

    def updating(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if outputs and not is_over:
            end()
        return update(outputs, *args, **kwargs)

    def assisting(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_over
        is_over = True  # What updates first has read drafts already.

        def fire(*_args: object) -> None:
            handle.remove()
            tell()

        handle = model.register_forward_hook(fire)
        return assist(*args, **kwargs)

    model._update_model_kwargs_for_generation = updating
    model._get_candidate_generator = assisting
    try:
        yield
    finally:
        del model._update_model_kwargs_for_generation, model._get_candidate_generator


def compiles_static_kv(model: PreTrainedModel) -> bool:
    """Does transformers compile the model's forward over a static KV cache?"""
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1)
    return bool(model._valid_auto_compile_criteria({KV: cache}, model.generation_config))
