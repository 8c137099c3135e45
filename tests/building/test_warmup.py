"""Reading fills the LUTs with what the model says, the same however often it is interrupted."""

import numpy as np
import pytest
import torch
from rich.console import Console

from selfspec import SelfSpec
from selfspec.building.learned import Learned
from selfspec.building.limits import vocab_size
from selfspec.building.progress import Bars
from selfspec.building.recipe import Recipe
from selfspec.building.warmup import Warmup
from selfspec.building.work_folder import open_work_folder
from selfspec.draft.memory import Memory
from selfspec.engine import top_k_of

DOCUMENTS = [[5, 6, 7, 8, 9, 10, 11], None, [20, 5, 6], [7], list(range(30, 45))]


def documents(skip=0):
    return [each and np.array(each, np.uint32) for each in DOCUMENTS[skip:]]


def recipe(**keys):
    return Recipe.of(**{"name": "n", "data": "d", "window": 4, "batch": 2, **keys})


def read(folder, model, *, moves=None, error=KeyboardInterrupt, save_seconds=0.0, **keys):
    """Reads on in `folder`; stopped after so many forwards."""
    spec = SelfSpec()
    with open_work_folder(folder / "c", {}, restart=False) as work:
        warmup = Warmup(work, recipe(**keys), model, spec, save_seconds=save_seconds)
        if moves is not None:
            forward, left = warmup._reader.read, [moves]

            def stopping(rows):
                left[0] -= 1
                if left[0] < 0:
                    raise error
                return forward(rows)

            warmup._reader.read = stopping
        if not warmup.finished:
            with Bars(Console(quiet=True)) as bars:
                warmup.run(iter(documents(warmup.documents)), bars.stage("reading", None))
        return warmup, spec.memory(vocab_size(model)).tables()


def expected_tables(model) -> dict:
    """Oracle: each window alone, in order."""
    memory: Memory = SelfSpec().memory(vocab_size(model))
    for ids in (each for each in DOCUMENTS if each):
        for start in range(0, len(ids), 4):
            window = ids[start : start + 4]
            with torch.inference_mode():
                logits = model(torch.tensor([window])).logits[0]
            pairs = list(zip([-1, *window], window, strict=False))
            memory.observe_pairs(np.array(pairs), top_k_of(logits, memory.top_k))
    return memory.tables()


def assert_same(one, other):
    assert one.keys() == other.keys()
    for source in one:
        for name, array in one[source].items():
            assert array.dtype == other[source][name].dtype
            assert np.array_equal(array, other[source][name]), (source, name)


def test_the_luts_hold_what_the_model_says(tmp_path, model):
    warmup, tables = read(tmp_path, model)
    assert warmup.tokens == sum(len(each) for each in DOCUMENTS if each)
    expected = expected_tables(model)
    assert set(tables) == {"lut", "lut2"}
    for source, key in (("lut", "tokens"), ("lut2", "pairs")):
        assert np.array_equal(tables[source][key], expected[source][key])
        assert np.array_equal(tables[source]["ids"], expected[source]["ids"])
        probabilities = tables[source]["probabilities"].astype(float)
        assert np.allclose(probabilities, expected[source]["probabilities"], atol=2e-3)


@pytest.mark.parametrize("save_seconds", [0.0, float("inf")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("moves", range(4))
def test_an_interrupted_reading_ends_the_same(tmp_path, model, moves, error, save_seconds):
    _, whole = read(tmp_path / "whole", model, save_seconds=float("inf"))
    folder = tmp_path / "parts"
    with pytest.raises(error):
        read(folder, model, moves=moves, error=error, save_seconds=save_seconds)
    warmup, tables = read(folder, model, save_seconds=save_seconds)
    assert_same(tables, whole)
    assert warmup.finished
    again, tables = read(folder, model)  # nothing is left to read
    assert again.tokens == warmup.tokens
    assert_same(tables, whole)


def test_ctrl_c_keeps_what_was_read(tmp_path, model):
    with pytest.raises(KeyboardInterrupt):
        read(tmp_path, model, moves=2, save_seconds=float("inf"))
    warmup, _ = read(tmp_path, model, moves=2)  # two forwards are left of four
    assert warmup.finished


def test_the_limit_ends_it(tmp_path, model):
    warmup, _ = read(tmp_path, model, warmup_tokens=9)
    assert 9 <= warmup.tokens < 9 + 2 * 4


def test_a_window_fits_into_the_model(tmp_path, model):
    warmup, _ = read(tmp_path, model, window=10_000)
    assert warmup._window == model.config.max_position_embeddings


def test_what_was_learned_comes_back_as_it_was(tmp_path, model):
    spec = SelfSpec()
    learned = Learned(tmp_path, spec, 50)
    ids = np.arange(12, dtype=np.int64)
    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(0))
    pairs = np.stack([ids[:-1], ids[1:]], axis=-1)
    learned.memory.observe_pairs(pairs, top_k_of(logits, 8))
    learned.memory.calibration.restore([[[["lut", 0, 1, 1, 0]], 0.1 + 0.2, 3.0]])
    before, rates = learned.memory.tables(), learned.memory.calibration.rows()
    learned.save(3)
    learned.restore(0)
    assert learned.memory.calibration.rows() == []
    learned.restore(3)
    assert_same(learned.memory.tables(), before)
    assert learned.memory.calibration.rows() == rates
    learned.save(4)
    assert learned.steps() == [0, 3, 4]
    learned.keep_only(4)
    assert learned.steps() == [0, 4]
