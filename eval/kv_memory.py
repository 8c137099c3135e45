"""What the KV costs in memory: stock's, and ours with its slots, at the same length of text.

    python -m eval kv_memory --model PATH --prompt-tokens 512 --new-tokens 128 --max-nodes 16 64

Counts the storages that the KV cache's layers lie in, whatever a layer shows of them. `held` is the
most that the layers held during any forward; `peak` the most that was alive at any moment, with
what was given up later than its successor was made. A tree needs slots of its own: `allowed` is
1.1 times what stock held, and these. All memory beside the weights stands next to it; on CUDA the
allocator's own figure too. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from eval.methods.storages import StorageLog
from eval.models.loading import DTYPES, load_asked
from eval.options import add_knob, add_model, parsed_knobs
from eval.report.table import Table
from eval.runs.environment import told, where
from selfspec import SelfSpec, attach
from selfspec.compat.generation import KV

_SLACK = 1.1  # times stock's
_COLUMNS = {
    "prompt": "{num_prompt_tokens}",
    "new": "{num_new_tokens}",
    "width": "{width}",
    "stock holds, MB": "{stock[held]!m:.2f}",
    "selfspec holds": "{selfspec[held]!m:.2f}{more}",
    "ratio": "{ratio:.2f}x",
    "allowed": "{allowed!m:.2f}",
    "stock's peak": "{stock[peak]!m:.2f}",
    "selfspec's peak": "{selfspec[peak]!m:.2f}",
    "ratio of peaks": "{peaks:.2f}x",
    "stock, all": "{stock[everything]!m:.2f}",
    "selfspec, all": "{selfspec[everything]!m:.2f}",
}
_ON_CUDA = {
    "stock on CUDA": "{stock[cuda]!m:.2f}",
    "selfspec on CUDA": "{selfspec[cuda]!m:.2f}",
}


class Memory(NamedTuple):
    """Bytes of one call, weights left out."""

    held: int  # by the KV's layers in a forward
    peak: int  # of all that was ever theirs, at a time
    everything: int  # all tensors, at a time
    column: int  # one token's KV in one row
    cuda: int | None  # all, as the allocator has it


class Comparison(NamedTuple):
    """Stock's memory and ours, behind the same text."""

    num_prompt_tokens: int
    num_new_tokens: int
    width: int  # of the widest forward
    stock: Memory
    ours: Memory

    @property
    def allowed(self) -> float:
        """What ours may hold: a tenth more than stock, and the tree."""
        return _SLACK * self.stock.held + self.width * self.stock.column


def run(options: argparse.Namespace) -> int:
    """Compares every length with every width, and prints a table and the JSON line."""
    knobs = parsed_knobs(options.knob)
    model = load_asked(options)
    lengths = itertools.product(options.prompt_tokens, options.new_tokens, options.max_nodes)
    found = [
        compare(model, num_prompt, num_new, **{"max_nodes": width, **knobs})
        for num_prompt, num_new, width in lengths
    ]
    rows = [_told(each) for each in found]
    has_cuda = model.device.type == "cuda"
    columns = _COLUMNS | _ON_CUDA if has_cuda else _COLUMNS
    print(Table.of("The KV's memory", columns, map(_cells, rows)).markdown())
    print(json.dumps(told("kv_memory", options, **where(model), rows=rows)))
    return 0


def compare(model: Any, num_prompt_tokens: int, num_new_tokens: int, **knobs: Any) -> Comparison:
    """One prompt of random tokens, answered by stock and by a fresh `SelfSpec`, to full length.

    Its trees are of full width, if no knob says otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (1, num_prompt_tokens), generator=generator).to(model.device)
    spec = SelfSpec(**{"budget": "fixed", **knobs})
    attach(model)
    spec.ability(model)  # is tried out once, and not part of a call

    def generate(**more: Any) -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=num_new_tokens,
            max_new_tokens=num_new_tokens,
            do_sample=False,
            **more,
        )

    stock, ours = watched(model, generate), watched(model, lambda: generate(assistant=spec))
    config = spec.config
    width = config.max_nodes
    return Comparison(num_prompt_tokens, num_new_tokens, width, stock, ours)


def watched(model: Any, run: Callable[[], object]) -> Memory:
    """The memory of what runs; looks at the KV behind every forward."""
    log = StorageLog()
    seen: set[int] = set()
    held, column = 0, 0

    def look(_module: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        nonlocal held, column
        cache = kwargs.get(KV)
        layers = [] if cache is None else cache.layers
        tensors = [tensor for layer in layers for tensor in _tensors(layer)]
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        held = max(held, sum(each.untyped_storage().nbytes() for each in storages.values()))
        column = sum(_column_bytes(layer) for layer in layers)
        seen.update(map(log.number, storages.values()))

    handle = model.register_forward_hook(look, with_kwargs=True)
    try:
        with log, _allocated(model.device) as allocated:
            run()
    finally:
        handle.remove()
    return Memory(held, log.peak(seen), log.peak(), column, allocated())


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    """All that a layer holds: keys, values and their slots."""
    for value in vars(layer).values():
        inner = value.values() if isinstance(value, dict) else [value]
        yield from (each for each in inner if isinstance(each, torch.Tensor))
        if isinstance(value, CacheLayerMixin):
            yield from _tensors(value)


def _column_bytes(layer: Any) -> int:
    """The bytes of one token in one layer."""
    return sum(
        each.element_size() * each[0, :, 0].numel()
        for each in (layer.keys, layer.values)
        if each.numel()
    )


@contextmanager
def _allocated(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yields what tells the most bytes that CUDA's allocator gave out inside; None elsewhere."""
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield lambda: int(torch.cuda.max_memory_allocated(device) - before)


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """What a row of the table shows; what holds more than is allowed is told."""
    stock, ours = row["stock"], row["selfspec"]
    return {
        **row,
        "more": "" if row["is_allowed"] else " (more)",
        "ratio": ours["held"] / stock["held"],
        "peaks": ours["peak"] / stock["peak"],
    }


def _told(each: Comparison) -> dict[str, Any]:
    """Plain values, in bytes."""
    return {
        "num_prompt_tokens": each.num_prompt_tokens,
        "num_new_tokens": each.num_new_tokens,
        "width": each.width,
        "stock": each.stock._asdict(),
        "selfspec": each.ours._asdict(),
        "allowed": round(each.allowed),
        "is_allowed": each.ours.held <= each.allowed,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    add_model(parser)
    option("--dtype", choices=DTYPES, default="float32", help="default: float32")
    many: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    option("--prompt-tokens", **many, default=[128, 1024], help="default: 128 1024")
    option("--new-tokens", **many, default=[128, 512], help="default: 128 512")
    option("--max-nodes", **many, default=[16, 64], help="of the trees; default: 16 64")
    add_knob(parser)
    parser.set_defaults(device="cpu")
