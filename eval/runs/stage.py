"""Everything that a contest needs, loaded: model, tokenizer, methods.

Knows how things are loaded; not what is asked of them, nor what becomes of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval.benches.dialogue import Prompter
from eval.benches.random_text import RandomPrompter
from eval.errors import EvalError
from eval.methods.method import Method, Resources, SelfSpecMethod
from eval.methods.registry import METHODS, new_method
from eval.models.loading import load_model, load_tokenizer
from eval.runs.asked import Asked
from eval.runs.timing import learned_curve
from selfspec import SpecConfig
from selfspec.cache import load_cache
from selfspec.cost import CostCurve
from selfspec.errors import unknown_name
from selfspec.forward.model import max_positions


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

    def left_out(self) -> dict[str, str]:
        """Who can't take part with this model on its device, and why."""
        reasons = {name: method.refusal(self.model) for name, method in self.methods.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def curve(self, num_columns: int) -> CostCurve:
        """What a forward costs by its width, as the methods came to know it."""
        for method in self.methods.values():
            if isinstance(method, SelfSpecMethod):
                costs = method.spec.runner(self.model).costs
                if curve := learned_curve(costs, method.stats.forward, num_columns):
                    return curve
        raise ValueError("no method with a measured budget has made enough steps")


def check_methods(asked: Asked) -> None:
    """Refuses what can't take part before anything is loaded."""
    for name in asked.methods:
        method, knobs, *_ = asked.variant(name)
        if method not in METHODS:
            raise EvalError(unknown_name("method", method, METHODS))
        if method == "ghidorah" and asked.tree is None:
            raise EvalError("method 'ghidorah' must have --tree FILE (got none); 'fit' makes one")
        SpecConfig.of(**{**asked.knobs, **knobs})
    if "rest" in asked.methods and asked.datastore is None:
        raise EvalError("method 'rest' must have --datastore FILE (got none); name a file of texts")
    if "assisted" in asked.methods and asked.assistant_model is None:
        raise EvalError("method 'assisted' must have --assistant-model (got none); name one")


def set_stage(asked: Asked) -> Stage:
    """Loads what was named; what is wrong with it is one line."""
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    tokenizer = load_tokenizer(asked.model)
    prompter = _prompter(asked, tokenizer)
    variants = {name: asked.variant(name) for name in asked.methods}
    caches = {variant.cache or asked.cache for variant in variants.values()}
    contents = {
        cache: None if cache is None else load_cache(cache, tokenizer=tokenizer) for cache in caches
    }
    where = {"dtype": asked.dtype, "device": asked.device}
    model = load_model(asked.model, shape=asked.shape, weights=asked.weights, **where)
    small = asked.assistant_model
    assistant = None if small is None else load_model(small, **where)
    datastore = [] if asked.datastore is None else _texts_of(asked.datastore, tokenizer)
    methods = {}
    for name, (method, knobs, cache, options) in variants.items():
        resources = Resources(
            config=SpecConfig.of(**{**asked.knobs, **knobs}),
            contents=contents[cache or asked.cache],
            options=options,
            assistant=assistant,
            tree=asked.tree,
            openvino=asked.openvino,
            datastore=datastore,
        )
        methods[name] = new_method(method, resources)
    return Stage(model, prompter, methods)


def _texts_of(path: Path, tokenizer: Any) -> list[list[int]]:
    """The texts of a file in ids: those between blank lines."""
    try:
        texts = [text for text in path.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"--datastore must be a file of UTF-8 text: {error}") from error
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def _prompter(asked: Asked, tokenizer: Any) -> Prompter:
    if asked.bench == "random":
        return RandomPrompter(tokenizer, asked.seed)
    return Prompter(tokenizer, asked.prompt_format)
