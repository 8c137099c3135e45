"""Tiny multimodal models by kind, with the inputs that their processors would give them."""

from __future__ import annotations

from functools import cache
from typing import Any

from eval.families.inputs import Inputs, media_inputs
from eval.families.shrink import small_model

# One of each kind, by what its steps need beyond the ids.
IN_THREE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # positions of three numbers each
BOTH_WAYS = ("gemma3", "paligemma")  # an image's tokens see each other
PLAIN = ("llava", "idefics3", "smolvlm", "got_ocr2", "internvl")  # ids, mask and KV alone
HYBRID = ("qwen3_5",)
SOUND = ("qwen2_audio", "voxtral")
READ_ACROSS = ("mllama",)  # cross-attention over the image
COLUMNS_BEFORE = ("git",)  # the image's KV has columns that the ids lack
MULTIMODAL = IN_THREE + BOTH_WAYS + PLAIN + HYBRID + SOUND + READ_ACROSS + COLUMNS_BEFORE


def multimodal(model_type: str, num_rows: int = 1) -> tuple[Any, Inputs]:
    """A model, and a prompt with an image or a sound in each row; the second row is padded."""
    model = _model(model_type)
    inputs = media_inputs(model, num_rows)
    assert inputs is not None
    return model, inputs


@cache
def _model(model_type: str) -> Any:
    return small_model(model_type)
