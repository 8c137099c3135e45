"""Tiny models with random heads, which transformers makes and nobody has trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.modeling_layers import MtpModel

from selfspec.compat.heads import RUNS_HEADS, num_heads
from selfspec.neural import heads as module
from tests.fakes import new_model

_PLACES = {"mtp_layer_types": ["full_attention"] * 2, "mtp_mlp_layer_types": ["sparse"] * 2}
_WINDOW = {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["sparse"]}

# The families to which transformers gives heads, and how their configs name them.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"num_nextn_predict_layers": 2},
    "sarvam-mla": {"num_nextn_predict_layers": 1},
    "glm4-moe": {"num_nextn_predict_layers": 3},
    "sarvam-moe": {"num_nextn_predict_layers": 1},
    "mellum": {"num_nextn_predict_layers": 1} | _WINDOW,
    "bailing": {"num_nextn_predict_layers": 2} | _PLACES,
    "inkling": {"num_mtp_layers": 2},
    "step3p7": {},
}

needs_heads = pytest.mark.skipif(not RUNS_HEADS, reason="this transformers runs no heads alone")


def model_with_heads(family: str = "deepseek-v3", number: int | None = None) -> Any:
    """A random model whose config names heads, as if it came from a checkpoint."""
    changes = FAMILIES[family] if number is None else {"num_nextn_predict_layers": number}
    model = new_model(family, **changes)
    model.config.name_or_path = "tiny"
    return model


def heads_of(model: Any) -> Any:
    """Random heads for it, always the same ones; the model stays as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        heads = MtpModel(copy.deepcopy(model), num_heads(model))
        for weight in heads.layers.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.3)
    heads.tie_with_main_model(model)
    return heads


@pytest.fixture
def random_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever model asks for its heads gets random ones."""
    monkeypatch.setattr(module, "load_heads", heads_of)
