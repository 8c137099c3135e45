"""Small models read what is in their images and sounds."""

from __future__ import annotations

import pytest
import torch

from eval.families.inputs import media_inputs, media_of
from eval.families.shrink import small_model


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava", "mllama", "voxtral"])
@torch.inference_mode()
def test_an_image_changes_the_logits_of_a_batch(family: str) -> None:
    model = small_model(family)
    inputs = media_inputs(model, 2, kind=media_of(model)[0])
    others = {n: v.flip(-1) if v.is_floating_point() else v for n, v in inputs.items()}

    logits, without = (model(**each).logits[:, -1] for each in (inputs, others))

    assert len(logits) == 2
    assert not logits.equal(without)
