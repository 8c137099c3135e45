"""Small models read what is in their images."""

from __future__ import annotations

import pytest
import torch

from tests.multimodal import MULTIMODAL, multimodal


@pytest.mark.parametrize("model_type", MULTIMODAL)
@torch.inference_mode()
def test_the_image_changes_the_logits_of_a_batch(model_type: str) -> None:
    model, inputs = multimodal(model_type, num_rows=2)
    images = [name for name, value in inputs.items() if value.is_floating_point()]
    others = {name: inputs[name].flip(-1) if name in images else inputs[name] for name in inputs}

    logits, without = (model(**each).logits[:, -1] for each in (inputs, others))

    assert logits.shape == (2, logits.shape[-1])
    assert not logits.equal(without)
