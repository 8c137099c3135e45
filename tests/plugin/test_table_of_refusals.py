"""The table of what is not served as asked: refused with a fix, or plain with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from selfspec.ability.probe import DraftSupport
from selfspec.compat.generation import KV
from selfspec.plugin.refusals import CallArguments, Consequence, reason_for
from tests.fakes import tiny_model


@pytest.mark.parametrize(
    ("knobs", "fix"),
    [
        ({"constraints": ["x"]}, "leave assistant= out"),
        ({"force_words_ids": [[1]]}, "leave assistant= out"),
        ({"use_mtp": True}, "leave assistant= out"),
        ({"num_beams": 3}, "set num_beams=1"),
    ],
)
def test_refusals_name_the_argument_and_the_fix(knobs: dict[str, Any], fix: str) -> None:
    ((name, value),) = knobs.items()
    config = GenerationConfig()
    for given in (knobs, {"generation_config": SimpleNamespace(**knobs)}):
        rule = reason_for(Consequence.REFUSED, CallArguments(tiny_model(), given))
        assert f"(got {name}={value!r})" in str(rule)
        assert fix in str(rule)
    assert reason_for(Consequence.REFUSED, CallArguments(tiny_model(), vars(config))) is None


def plain(
    config: GenerationConfig | None = None, mode: str = "tree", model: Any = None, **kwargs: Any
) -> str | None:
    config = config or GenerationConfig()
    call = SimpleNamespace(
        model=model or tiny_model("llama"),
        model_kwargs={KV: DynamicCache()} | kwargs,
        input_ids=torch.ones(1, 3),
        generation_config=config,
        max_new_columns=50,
        synced_gpus=False,
        look=None,
        support=DraftSupport(mode, None if mode == "tree" else "it can't", None),
        setting=lambda name: getattr(config, name, None),
    )
    return reason_for(Consequence.PLAIN, call)


def test_what_is_decoded_plainly_has_a_reason() -> None:
    offloaded = DynamicCache()
    offloaded.offloading = True  # To make one, a build of torch for CUDA needs a GPU.
    assert "offloaded DynamicCache" in str(plain(**{KV: offloaded}))
    assert plain(mode="plain") == "it can't"


def test_ordinary_calls_have_no_reason_to_be_plain() -> None:
    mask = torch.ones(1, 3)
    assert plain() is None
    assert plain(mode="chain") is None
    assert plain(attention_mask=mask, use_cache=True, logits_to_keep=1, position_ids=mask) is None
    assert plain(GenerationConfig(output_attentions=True)) is None  # stock returns none either
