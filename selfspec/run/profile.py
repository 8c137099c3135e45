"""`profile`: what forwards of a model cost on this machine, measured at once."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from selfspec.compat.generation import KV
from selfspec.config import SpecConfig
from selfspec.cost import WIDTHS, CostCurve, measure_curve
from selfspec.errors import UnsupportedError
from selfspec.records import DraftTree
from selfspec.run.backend import Backend
from selfspec.run.costs import keep_curve
from selfspec.run.graphs.runner import stepped
from selfspec.run.model import device_of
from selfspec.run.prepared import Forwards
from selfspec.run.prompt import Prompt

__all__ = ["profile"]


@torch.no_grad()
def profile(
    model: Any, config: SpecConfig, *, num_columns: int, num_rows: int, max_seconds: float = 30.0
) -> tuple[dict[str, str | int], CostCurve]:
    """Measures what forwards cost behind a text of `num_columns` tokens, run as a call runs them.

    Returns what the curve depends on, with the curve, which the next call that is run in the same
    way starts from. Where packed weights pay, that is one that comes after they are packed. Refuses
    a model that can't verify a tree, or can't be run as the config asks.
    """
    forwards = Forwards()
    ability = forwards.ability(model, config)
    if ability.attention is None:
        raise UnsupportedError(f"a profile needs a model that can verify trees: {ability.reason}")
    strict = config.changed(strict=True)
    with forwards.prepare(model, strict) as prepared, prepared.decoding():
        if prepared.packing is not None:
            prepared.packing.pack()
        prompt, width = _prompt(model, num_columns, num_rows), WIDTHS[-1]
        backend = prepared.backend(prompt, reach=width, width=width)
        curve = _measured(backend, num_rows, max_seconds)
    sizes = {"num_columns": num_columns, "num_rows": num_rows}
    return keep_curve(model, backend, curve, **sizes), curve


def _prompt(model: Any, num_columns: int, num_rows: int) -> Prompt:
    """A prompt of one token again and again, read."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = torch.ones(num_rows, num_columns, dtype=torch.long, device=device_of(model))
    model(input_ids=ids, use_cache=True, logits_to_keep=1, **{KV: cache})
    positions = torch.full((num_rows, 1), num_columns, device=device_of(model))
    kwargs = {KV: cache, "position_ids": positions}
    return Prompt(ids, kwargs, torch.empty(0, device=ids.device), None)


def _measured(backend: Backend, num_rows: int, max_seconds: float) -> CostCurve:
    """Runs forwards behind the text without a commit, so that the KV stays as it was."""

    def run(width: int) -> None:
        tree = DraftTree.of_root(0)
        for token in range(1, width):
            tree.add(0, token, 0.0)
        logits = backend.forward(backend.lay_out([tree] * num_rows))
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)

    widths = WIDTHS
    if backend.kind == "graph":
        widths = tuple(width for width in WIDTHS if stepped(width) == width)
        for width in widths:  # Captures all of them first, since a capture takes long.
            run(width)
    return measure_curve(run, widths, max_seconds=max_seconds)
