"""A grown model computes what its source does, at the size that was asked for."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from eval.models.grown import grow, num_parameters
from eval.models.shapes import SHAPES, GrownShape
from tests.fakes import new_model, tiny_tokenizer

VOCAB = 97
WIDE = GrownShape(
    hidden_size=160,
    num_hidden_layers=4,
    num_attention_heads=10,
    num_key_value_heads=5,
    intermediate_size=224,
    head_dim=16,
)
SIZES = {"hidden_size": 64, "intermediate_size": 80, "num_key_value_heads": 4, "head_dim": 16}


def make_source(**changes) -> LlamaForCausalLM:
    """A random Llama whose norm weights aren't all one; leaves the global random stream alone."""
    model = new_model("llama", None, **SIZES | changes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2.0)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.2)
    return model


@torch.no_grad()
def logits_of(model: LlamaForCausalLM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return model(torch.randint(1, VOCAB, (2, 12), generator=generator)).logits.float()


def assert_same_function(source: LlamaForCausalLM, grown: LlamaForCausalLM) -> None:
    before, after = logits_of(source), logits_of(grown)
    assert len(before.argmax(-1).unique()) > 4, "worth comparing"
    assert (before - after).abs().max() < 1e-5 * before.abs().max()


SOURCES = {
    "gqa": {"num_key_value_heads": 2},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "large eps": {"rms_norm_eps": 0.1},  # a wrong eps shows
    "deep": {"num_hidden_layers": 5},
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_same_logits(source):
    model = make_source(**source)
    grown = grow(model, WIDE)
    assert_same_function(model, grown)
    assert num_parameters(grown) > num_parameters(model)


def test_the_command(told, tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", WIDE)
    monkeypatch.setitem(SHAPES, "narrow", replace(WIDE, hidden_size=48))
    source, out = tmp_path / "source", tmp_path / "grown"
    make_source(tie_word_embeddings=True).save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    asked = ["--model", str(source), "--out", str(out), "--shape"]
    assert "hidden_size must be" in told("grow", *asked, "narrow")[2]
    assert told("grow", *asked, "tiny")[0] == 0
    assert_same_function(*(LlamaForCausalLM.from_pretrained(path).eval() for path in (source, out)))
    status, _, error = told("grow", *asked, "tiny")
    assert (status, error.count("\n")) == (2, 1)
    assert "--out must be a new or an empty folder" in error
