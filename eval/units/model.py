"""A whole Llama over the nodes of a tree, whose work two units share.

All decoder layers and the output head are shared; the embeddings and the norms are computed where
the thread is that asks. The text in front of the tree is a prompt that the model has read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from eval.models.shapes import GrownShape
from eval.units.layer import KINDS, ByRows, Layer, Shared, pieces, tree_mask, tree_parents
from eval.units.unit import Pair
from selfspec.compat.generation import KV

_Part = Callable[[torch.Tensor], torch.Tensor]


class Read(NamedTuple):
    """A model behind a prompt, with the nodes of a tree, and the logits that it gives for them."""

    layers: list[Layer]
    head: torch.Tensor  # (V, hidden), with the last norm's weights in it
    nodes: torch.Tensor  # (W, hidden): embedded
    logits: torch.Tensor  # (W, V): of the model itself

    @classmethod
    def of(cls, model: Any, prompt_ids: torch.Tensor, width: int) -> Read:
        """Reads a prompt (1, L) and takes the tree's tokens from its beginning."""
        inner, config, length = model.model, model.config, prompt_ids.shape[1]
        cache = DynamicCache(config=config)
        model(input_ids=prompt_ids, **{KV: cache}, logits_to_keep=1)
        texts = [(layer.keys, layer.values) for layer in cache.layers]
        ids = prompt_ids[:, torch.arange(width) % length]
        positions = torch.tensor([[length + depth for depth in _depths(tree_parents(width))]])
        nodes = inner.embed_tokens(ids)
        rotation = inner.rotary_emb(nodes, positions)
        mask, group = tree_mask(width), config.num_attention_heads // config.num_key_value_heads
        layers = [
            Layer(
                _shape(config),
                _weights(layer),
                text,
                mask.repeat(1, 1, group, 1),
                (rotation[0][0], rotation[1][0]),
                config.rms_norm_eps,
            )
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
    """The layers and the head, shared by `way`: by columns, by rows, or by one unit alone."""

    def __init__(
        self, read: Read, units: Pair, way: Callable[[Layer], _Part], share: float
    ) -> None:
        self._parts = [way(layer) for layer in read.layers]
        self._head = pieces([read.head], units, share)
        self._normed = read.layers[0].normed
        self._units = units

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The logits (W, V) of embedded nodes (W, hidden)."""
        for part in self._parts:
            x = part(x)
        x = self._normed(x)
        return torch.cat(self._units.run(*(piece.task(x) for piece in self._head)), dim=-1)

    @classmethod
    def by_columns(cls, read: Read, units: Pair, shares: dict[str, float]) -> SharedModel:
        """Ghidorah's way; the head is shared as the widest matrices are."""
        return cls(read, units, lambda layer: Shared(layer, units, shares), shares["gate_up"])

    @classmethod
    def by_rows(cls, read: Read, units: Pair, share: float) -> SharedModel:
        """Megatron-LM's way."""
        return cls(read, units, lambda layer: ByRows(layer, units, share), share)


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _shape(config: Any) -> GrownShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return GrownShape(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        head_dim=head_dim,
    )


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
