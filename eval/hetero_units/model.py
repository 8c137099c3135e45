"""A whole Llama over the nodes of a tree, whose work two units share: Ghidorah's figure 9.

It compares sequential decoding, a tree on one unit, a tree on two units that are split by rows, and
one on two units that are split by columns. All decoder layers and the output head are shared; the
embeddings and the norms are computed where the thread is that asks. The text in front of the tree
is a prompt that the model has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from eval.hetero_units.attention import tree_mask
from eval.hetero_units.layer import KINDS, ByRows, Layer, Shared, pieces, profiled
from eval.hetero_units.unit import Pair, seconds_of
from eval.methods.reported import TOKENS_BY_WIDTH
from eval.models.shapes import GrownShape
from eval.report.table import NONE, Table
from selfspec.compat.generation import KV

_WAYS = ("one unit", "by rows", "by columns")
_Part = Callable[[torch.Tensor], torch.Tensor]


class Read(NamedTuple):
    """A model after a prompt, with the nodes of a tree, and the logits that it gives for them."""

    layers: list[Layer]
    head: torch.Tensor  # (V, hidden), with the last norm's weights in it
    nodes: torch.Tensor  # (W, hidden): embedded
    logits: torch.Tensor  # (W, V): of the model itself

    @classmethod
    def of(cls, model: Any, prompt_ids: torch.Tensor, parents: list[int]) -> Read:
        """Reads a prompt (1, L) and takes the tree's tokens from its beginning."""
        inner, config, length = model.model, model.config, prompt_ids.shape[1]
        cache = DynamicCache(config=config)
        model(input_ids=prompt_ids, **{KV: cache}, logits_to_keep=1)
        texts = [(layer.keys, layer.values) for layer in cache.layers]
        ids = prompt_ids[:, torch.arange(len(parents)) % length]
        positions = torch.tensor([[length + depth for depth in _depths(parents)]])
        nodes = inner.embed_tokens(ids)
        rotation = [each[0] for each in inner.rotary_emb(nodes, positions)]
        mask, group = tree_mask(parents), config.num_attention_heads // config.num_key_value_heads
        of_all = (mask.repeat(1, 1, group, 1), rotation, config.rms_norm_eps)
        layers = [
            Layer(_shape(config), _weights(layer), text, *of_all)
            for layer, text in zip(inner.layers, texts, strict=True)
        ]
        logits = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=pad(mask, (length, 0)),
            **{KV: cache},
        ).logits
        return cls(layers, model.lm_head.weight * inner.norm.weight, nodes[0], logits[0])


class SharedModel:
    """The layers and the head, shared by `way`; the head by `share`."""

    def __init__(
        self, read: Read, units: Pair, way: Callable[[Layer], _Part], share: float
    ) -> None:
        self._parts = [way(layer) for layer in read.layers]
        self._head = pieces([read.head], share)
        self._normed = read.layers[0].normed
        self._units = units

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The logits (W, V) of embedded nodes (W, hidden)."""
        for part in self._parts:
            x = part(x)
        x = self._normed(x)
        return torch.cat(self._units.run(*(piece.task(x) for piece in self._head)), dim=-1)


def timed_widths(
    model: Any, prompt_ids: torch.Tensor, units: Pair, trees: Sequence[list[int]], rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each tree, that of sequential decoding first: milliseconds of a forward."""
    for parents in ([-1], *trees):
        read = Read.of(model, prompt_ids, parents)
        ways = _ways(read, units, len(parents))
        largest = read.logits.abs().max()
        wrong = max(float((way(read.nodes) - read.logits).abs().max()) for way in ways.values())
        seconds = seconds_of(ways, [read.nodes], rounds)
        times = {name: round(1000 * time, 2) for name, time in seconds.items()}
        yield {"width": len(parents), "ms": times, "difference": wrong / float(largest)}


def _ways(read: Read, units: Pair, width: int) -> dict[str, _Part]:
    """The head is shared as the widest matrices are."""

    def by_columns(shares: dict[str, float]) -> SharedModel:
        return SharedModel(
            read, units, lambda layer: Shared(layer, units, shares), shares["gate_up"]
        )

    alone = by_columns(dict.fromkeys(KINDS, 1.0))
    if width == 1:
        return {_WAYS[0]: alone}
    shares = profiled(read.layers[len(read.layers) // 2], units, width)
    share = mean(shares.values())
    by_rows = SharedModel(read, units, lambda layer: ByRows(layer, units, share), share)
    return dict(zip(_WAYS, (alone, by_rows, by_columns(shares)), strict=True))


def widths_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds, and with the paper's tokens a step the speed-up over sequential decoding."""
    plain = rows[0]["ms"][_WAYS[0]]
    cells = []
    for row in rows:
        tokens = TOKENS_BY_WIDTH.get(row["width"])
        times = [row["ms"].get(way) for way in _WAYS]
        cells.append(
            [str(row["width"]), f"{tokens:.2f}" if tokens else NONE]
            + [f"{ms:.0f}" if ms else NONE for ms in times]
            + [f"{tokens * plain / ms:.2f}" if ms and tokens else NONE for ms in times]
            + [f"{row['difference']:.0e}"]
        )
    head = ["nodes", "tokens, table I", *(f"{way}, ms" for way in _WAYS)]
    head += [*(f"{way}, speed-up" for way in _WAYS), "difference"]
    note = (
        "A whole model. The speed-up is over one node on the first unit, with the tokens a step of "
        "Ghidorah's table I, where it has that width. The difference is that of the logits from "
        "the model's own."
    )
    return Table("Widths on one unit and on two", head, cells, note)


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _shape(config: Any) -> GrownShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
    sizes = {name: getattr(config, name) for name in (*names, "intermediate_size")}
    return GrownShape(**sizes, head_dim=head_dim)


def _weights(layer: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """The matrices by kind, with the weights of the norm in front of each in it."""
    attention, mlp = layer.self_attn, layer.mlp
    before, between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    qkv = [each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    matrices = (
        (torch.cat(qkv) * before,),
        (attention.o_proj.weight,),
        (mlp.gate_proj.weight * between, mlp.up_proj.weight * between),
        (mlp.down_proj.weight,),
    )
    return dict(zip(KINDS, matrices, strict=True))
