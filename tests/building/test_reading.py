"""Reading fills the LUTs with what the model says."""

import numpy as np
import pytest
import torch

from selfspec import SelfSpec
from selfspec.building.limits import vocab_size
from selfspec.building.reading import teach
from selfspec.building.recipe import Recipe
from selfspec.engine import top_k_of

DOCUMENTS = [[5, 6, 7, 8, 9, 10, 11], None, [20, 5, 6], [7], list(range(30, 45))]


def read(model, **keys):
    memory = SelfSpec().memory(vocab_size(model))
    told = []
    recipe = Recipe.of(**{"data": "d", "window": 4, "batch": 2, **keys})
    documents = (each and np.array(each) for each in DOCUMENTS)
    number = teach(
        memory, model, documents, recipe, prefix=[], tell=lambda *each: told.append(each)
    )
    assert sum(tokens for _, tokens in told) == number
    return number, memory.tables()


def test_the_luts_hold_what_the_model_says(model):
    """Each window alone, in order, gives the same."""
    memory = SelfSpec().memory(vocab_size(model))
    for ids in (each for each in DOCUMENTS if each):
        for start in range(0, len(ids), 4):
            window = ids[start : start + 4]
            with torch.inference_mode():
                logits = model(torch.tensor([window])).logits[0]
            pairs = list(zip([-1, *window], window, strict=False))
            memory.observe_pairs(np.array(pairs), top_k_of(logits, memory.top_k))
    expected = memory.tables()
    number, tables = read(model)
    assert number == sum(len(each) for each in DOCUMENTS if each)
    for source, key in (("lut", "tokens"), ("lut2", "pairs")):
        assert np.array_equal(tables[source][key], expected[source][key])
        assert np.array_equal(tables[source]["ids"], expected[source]["ids"])
        probabilities = tables[source]["probabilities"].astype(float)
        assert np.allclose(probabilities, expected[source]["probabilities"], atol=2e-3)


@pytest.mark.parametrize(("keys", "most"), [({"warmup_tokens": 9}, 9 + 2 * 4), ({}, 26)])
def test_the_limit_ends_it(model, keys, most):
    assert min(9, most) <= read(model, **keys)[0] <= most


def test_a_window_fits_into_the_model(model, monkeypatch):
    monkeypatch.setattr(model.config, "max_position_embeddings", 4)
    _, one = read(model, window=10_000)
    _, other = read(model, window=4)
    assert np.array_equal(one["lut2"]["ids"], other["lut2"]["ids"])
