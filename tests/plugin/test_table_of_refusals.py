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
from tests.fakes import new_model, tiny_model


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


def plain(mode: str = "tree", model: Any = None, **kwargs: Any) -> str | None:
    config = GenerationConfig()
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
    types = torch.zeros(1, 3, dtype=torch.long)
    reason = plain(model=tiny_model("gpt2"), token_type_ids=types)
    assert reason == "its plain steps get 'token_type_ids', and drafts do not"
    assert plain(mode="plain") == "it can't"
    assert plain() is plain(mode="chain") is None


@pytest.mark.parametrize(("kept", "is_plain"), [(52, True), (53, False)])
def test_attention_that_keeps_some_columns_is_drafted_for_up_to_their_number(
    kept: int, is_plain: bool
) -> None:
    """As that of Doge; which of two equal columns it keeps depends on the shape of the forward."""
    model = new_model("llama", keep_window_size=kept)
    assert (f"keeps the {kept} strongest" in str(plain(model=model))) == is_plain
