"""The bench of models with running states, at a size that takes no time."""

from __future__ import annotations

import pytest

from eval import hybrid

SMALL = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def test_right_predictions_save_steps(figures, monkeypatch):
    shape = {"model_type": "lfm2", "layer_types": "cca", **SMALL}
    monkeypatch.setitem(hybrid.SHAPES, "lfm2-700m", shape)
    asked = ["--shape", "lfm2-700m", "--layers", "3", "--tokens", "24", "--texts", "1"]
    methods = figures("hybrid", *asked, "--shares", "0", "100", "--budget", "fixed")["methods"]
    assert methods["stock"]["steps"] == 23
    assert methods["0 % right"]["steps"] > methods["100 % right"]["steps"]
    assert methods["100 % right"]["nodes"] > 2
    assert all(each["tokens"] == 23 for each in methods.values())


@pytest.mark.parametrize(("asked", "said"), [("--tokens 0", "--tokens"), ("--shape x", "'x'")])
def test_what_can_not_be_asked(told, asked, said):
    status, _, errors = told("hybrid", *asked.split())
    assert status == 2
    assert said in errors
