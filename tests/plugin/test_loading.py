"""`load`: the model of transformers, attached, and options that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfspec import ConfigError, SelfSpec, WeightsError, load
from tests.fakes import new_model, prompt

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_model().save_pretrained(tmp_path)
    return tmp_path


def test_it_is_the_model_of_transformers(folder: Path) -> None:
    model, stock = load(folder), new_model()
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.state_dict().keys() == stock.state_dict().keys()
    for name, weight in stock.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    model.generate(**prompt(), assistant=SelfSpec(), max_new_tokens=3)


@pytest.mark.parametrize("dtype", ["auto", "float16", torch.float16])
@pytest.mark.parametrize("limit", [None, "1GB"])
def test_dtypes(folder: Path, dtype: str | torch.dtype, limit: str | None) -> None:
    expected = torch.float32 if dtype == "auto" else torch.float16
    assert load(folder, limit, dtype=dtype).dtype == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_memory", "some"),
        *(("max_length", 0), ("max_texts", 0)),
        ("device", "cuda:99"),
        *(("dtype", "flaot32"), ("dtype", "nn"), ("dtype", torch.int8), ("device", "meta")),
    ],
)
def test_wrong_options(folder: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        load(folder, **{name: value})  # type: ignore[arg-type]


def test_weights_that_are_not_there_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / FILE)
    del weights["model.norm.weight"]
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"they lack 'model\.norm\.weight'"):
        load(folder)
