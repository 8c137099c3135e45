"""What the KV costs in memory: stock's, and ours with its slots, at the same length of text.

    python -m eval kv_memory --model PATH --prompt-tokens 512 --new-tokens 128 --max-nodes 16 64

Counts the storages that the KV cache's layers lie in, whatever a layer shows of them: the most that
they held during any forward. A tree needs slots of its own: `allowed` is 1.1 times what stock held,
and these. On CUDA the allocator's own peak stands next to it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from eval.models.loading import load_asked
from eval.options import add_knob, add_model, parsed_knobs
from eval.report.table import Table
from eval.runs.environment import told, where
from selfspec import SelfSpec, attach, per_token
from selfspec.compat.generation import KV

_SLACK = 1.1  # times stock's
_COLUMNS = {
    "prompt": "{num_prompt_tokens}",
    "new": "{num_new_tokens}",
    "width": "{width}",
    "stock holds, MB": "{stock[held]!m:.2f}",
    "selfspec holds, MB": "{selfspec[held]!m:.2f}",
    "ratio": "{ratio:.2f}x",
    "allowed, MB": "{allowed!m:.2f}",
    "stock's peak on CUDA, MB": "{stock[cuda]!m:.2f}",
    "selfspec's, MB": "{selfspec[cuda]!m:.2f}",
}


class Memory(NamedTuple):
    """Bytes of one call, weights left out."""

    held: int  # by the KV's layers in a forward
    column: int  # one token's KV in one row
    cuda: int | None  # the peak of all, as the allocator has it


def run(options: argparse.Namespace) -> int:
    """Compares every length with every width, and prints a table and the JSON line."""
    knobs = parsed_knobs(options.knob)
    model = load_asked(options)
    lengths = itertools.product(options.prompt_tokens, options.new_tokens, options.max_nodes)
    rows = [
        compare(model, num_prompt, num_new, **{"max_nodes": width, **knobs})
        for num_prompt, num_new, width in lengths
    ]
    print(Table.of("The KV's memory", _COLUMNS, rows).telling().markdown())
    print(json.dumps(told("kv_memory", options, **where(model), rows=rows)))
    return 0


def compare(
    model: Any, num_prompt_tokens: int, num_new_tokens: int, **knobs: Any
) -> dict[str, Any]:
    """One prompt of random tokens, answered by stock and by a fresh `SelfSpec`, to full length.

    Its trees are of full width, if no knob says otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (1, num_prompt_tokens), generator=generator).to(model.device)
    spec = SelfSpec(**{"budget": "fixed", **knobs})
    attach(model)

    def generate(**more: Any) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=num_new_tokens,
            max_new_tokens=num_new_tokens,
            do_sample=False,
            **more,
        )

    stock, ours = (
        watched(model, generate),
        watched(model, lambda: generate(assistant=spec), lambda: spec.ability(model)),
    )
    width = spec.config.max_nodes
    allowed = _SLACK * stock.held + width * stock.column
    return {
        "num_prompt_tokens": num_prompt_tokens,
        "num_new_tokens": num_new_tokens,
        "width": width,
        "stock": stock._asdict(),
        "selfspec": ours._asdict(),
        "ratio": ours.held / stock.held,
        "allowed": round(allowed),
        "is_allowed": ours.held <= allowed,
    }


def watched(
    model: Any, run: Callable[[], object], prepare: Callable[[], object] | None = None
) -> Memory:
    """The memory of what runs; looks at the KV after every forward but those of `prepare`."""
    held, column = 0, 0

    def look(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        nonlocal held, column
        cache = kwargs.get(KV)
        layers = [] if cache is None else cache.layers
        storages = [tensor.untyped_storage() for layer in layers for tensor in _tensors(layer)]
        by_address = {each.data_ptr(): each.nbytes() for each in storages}
        held = max(held, sum(by_address.values()))
        column = sum(_column_bytes(layer) for layer in layers)

    on_cuda = model.device.type == "cuda"
    before = torch.cuda.memory_allocated(model.device) if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    handle = model.register_forward_hook(per_token(look), with_kwargs=True)
    try:
        if prepare is not None:
            prepare()
            held = column = 0
        run()
    finally:
        handle.remove()
    peak = torch.cuda.max_memory_allocated(model.device) - before if on_cuda else None
    return Memory(held, column, peak)


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    """All that a layer holds: keys, values and their slots."""
    for value in vars(layer).values():
        inner = value.values() if isinstance(value, dict) else [value]
        yield from (each for each in inner if isinstance(each, torch.Tensor))
        if isinstance(value, CacheLayerMixin):
            yield from _tensors(value)


def _column_bytes(layer: Any) -> int:
    """The bytes of one token in one layer."""
    parts = [each for each in (layer.keys, layer.values) if each.numel()]
    return sum(each.element_size() * each[0, :, 0].numel() for each in parts)


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    add_model(parser, dtype="float32", device="cpu")
    many: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    option("--prompt-tokens", **many, default=[128, 1024], help="default: 128 1024")
    option("--new-tokens", **many, default=[128, 512], help="default: 128 512")
    option("--max-nodes", **many, default=[16, 64], help="of the trees; default: 16 64")
    add_knob(parser)
