"""Everything that a contest needs, loaded: model, tokenizer, methods.

Knows how things are loaded; not what is asked of them, nor what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from eval import published as _published  # noqa: F401  (makes the published methods known)
from eval.asked import Asked, Shard
from eval.dialogue import Prompter
from eval.errors import EvalError
from eval.grow import grow
from eval.methods import METHODS, Method, Resources, new_method
from selfspec import SelfSpec, SpecConfig
from selfspec.build.limits import max_positions
from selfspec.cli.loading import load_model, load_tokenizer
from selfspec.cli.options import ModelOptions
from selfspec.errors import unknown_name
from selfspec.store import load_cache

__all__ = ["Stage", "check_methods", "set_stage"]


class Stage(NamedTuple):
    """A model, how questions are put to it, and who answers with it."""

    model: Any
    prompter: Prompter
    methods: dict[str, Method]

    def no_room(self, num_prompt_tokens: int, num_new_tokens: int) -> str | None:
        """Why a prompt and its answer don't fit into the model's positions; None where they do."""
        most = max_positions(self.model)
        if most is None or num_prompt_tokens + num_new_tokens <= most:
            return None
        return (
            f"{num_prompt_tokens} tokens of prompt and {num_new_tokens} new ones must fit into "
            f"the model's {most} positions"
        )


def check_methods(asked: Asked) -> None:
    """Refuses what can't take part before anything is loaded."""
    for name in asked.methods:
        method, knobs = asked.variant(name)
        if method not in METHODS:
            raise EvalError(unknown_name("method", method, METHODS))
        SpecConfig.of(**{**asked.knobs, **knobs})
    if "assisted" in asked.methods and asked.assistant_model is None:
        raise EvalError("method 'assisted' must have --assistant-model (got none); name one")


def set_stage(asked: Asked, shard: Shard) -> Stage:
    """Loads what was named; what is wrong with it is one line."""
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    options = ModelOptions(
        model=asked.model, device=_device(asked.device, shard), dtype=asked.dtype
    )
    tokenizer = load_tokenizer(options)
    prompter = Prompter(tokenizer, asked.prompt_format)
    new_spec = _spec_maker(asked.cache, tokenizer)
    model = load_model(options, tokenizer).model
    if asked.shape is not None:
        model = grow(model, asked.shape).to(model.device)
    assistant = _assistant(asked, options, tokenizer)
    methods = {}
    for name in asked.methods:
        method, knobs = asked.variant(name)
        config = SpecConfig.of(**{**asked.knobs, **knobs})
        resources = Resources(config=config, new_spec=new_spec, assistant=assistant)
        methods[name] = new_method(method, resources)
    return Stage(model.eval(), prompter, methods)


def _device(name: str, shard: Shard) -> str:
    """A GPU for each process of a machine, where no single one is named."""
    takes_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return f"cuda:{shard.local_rank}" if takes_gpu and shard.num_shards > 1 else name


def _spec_maker(cache: str | None, tokenizer: Any) -> Callable[[SpecConfig], SelfSpec]:
    """Makes what knows nothing, or what the cache does; the cache is read once."""
    if cache is None:
        return SelfSpec
    contents = load_cache(cache, tokenizer=tokenizer)
    return lambda config: SelfSpec.from_contents(contents, config=config)


def _assistant(asked: Asked, options: ModelOptions, tokenizer: Any) -> Any:
    if asked.assistant_model is None:
        return None
    named = ModelOptions(model=asked.assistant_model, device=options.device, dtype=options.dtype)
    return load_model(named, tokenizer).model.eval()
