"""A model and a tokenizer by name, for every command; what is wrong with them is one line."""

from __future__ import annotations

from typing import Any

import torch

from eval.models.grown import grow
from selfspec import attach
from selfspec.cli import loading
from selfspec.cli.options import ModelOptions, RunOptions


def load_model(
    name: str | None, *, dtype: str, device: str, shape: str | None = None, weights: Any = None
) -> Any:
    """The model of a folder or Hub id, grown where a shape is named, for assistants.

    None: the embedded one.
    """
    precision: Any = dtype  # The options check it.
    asked = RunOptions(model=name, device=device, dtype=precision, weights=weights)
    model = loading.load_model(asked)
    return attach((model if shape is None else grow(model, shape)).eval())


def load_asked(options: Any, weights: Any = None) -> Any:
    """The model that a command's options name, on as many threads as they say."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    where = {"dtype": options.dtype, "device": options.device}
    return load_model(options.model, shape=options.shape, weights=weights, **where)


def load_tokenizer(name: str | None) -> Any:
    """That model's tokenizer."""
    return loading.load_tokenizer(ModelOptions(model=name))
