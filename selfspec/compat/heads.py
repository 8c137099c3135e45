"""The heads for several tokens that come with a model, as transformers itself runs them.

It calls them multi-token prediction (MTP). In 5.17 its code needs more than a text and its states.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, MtpCache
from transformers.modeling_layers import MtpModel

# There is a method that runs a single head in 5.24, and not in 5.17.
RUNS_HEADS = hasattr(MtpModel, "forward_layer")


def num_heads(model: PreTrainedModel) -> int:
    """How many heads the config promises in a form that this transformers can run."""
    if not RUNS_HEADS:
        return 0
    return getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None) or 0


def load_heads(model: PreTrainedModel) -> Any:
    """The heads, with their weights from the model's checkpoint; many errors say that it can't be.

    Embeddings and the output head are the model's own modules.
    """
    device = next(model.get_decoder().layers[-1].parameters()).device
    return MtpModel.from_pretrained(model, device_map={"": device})


def new_kv_of_heads(heads: Any) -> Any:
    """An empty KV cache for `read_by_heads`, which can be cropped where that is needed."""
    kv = MtpCache(config=heads.config)
    if heads.num_mtp_layers > 1:
        kv.activate_past_recording()  # Windows and running states keep what a crop gives back.
    return kv


def read_by_heads(
    heads: Any, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, kv: Cache
) -> torch.Tensor:
    """The logits (H, V) of the heads after a text, which they read with the likeliest token.

    `states` (1, N, D) entered the output head before the tokens `ids` (1, N) at `positions`. Of
    head number h, counted from 0, the last h columns of KV rest on guesses.
    """
    scale = getattr(heads.config, "logits_mup_width_multiplier", None)  # The output head's input.
    _, logits, _ = heads(
        input_ids=ids,
        last_hidden_states=states if scale is None else states * scale,
        attention_mask=None,
        position_ids=positions,
        mtp_cache=kv,
    )
    return logits[0]  # type: ignore[no-any-return]
