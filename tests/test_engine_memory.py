"""What a call learns from and leaves behind, by its learning scope; and the top-K of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import Memory
from selfspec.draft.sources import ContextSource, LutSource
from selfspec.engine import top_k_of
from tests.scripted import VOCAB, Run, ScriptedModel, omniscient

MODEL = ScriptedModel(seed=3)


def test_learning_scopes():
    memory = Memory([LutSource(VOCAB, 3), ContextSource(3)], Calibration(), top_k=3)
    session = memory.for_request("session")
    assert session.sources is memory.sources
    assert session.calibration is memory.calibration
    assert session.learns
    request = memory.for_request("request")
    assert request.learns
    assert request.sources[0] is not memory.sources[0]
    assert request.calibration is not memory.calibration
    frozen = memory.for_request("frozen")
    assert frozen.sources is memory.sources
    assert not frozen.learns


def test_a_frozen_memory_keeps_its_tables_and_its_rates():
    lut = LutSource(VOCAB, 3)
    run = Run(MODEL, [[1, 2]], [lut, omniscient(MODEL)], learns=False)
    run.decode()
    assert int((lut.rows.token_ids >= 0).sum()) == 0
    assert run.memory.calibration._rates == {}
    assert all(record.top is None for record in run.records)


def test_the_luts_hold_what_the_model_said_last():
    model = ScriptedModel(8, order=1)  # the last token decides, so a LUT can know it all
    lut = LutSource(VOCAB, 3)
    run = Run(model, [[1, 2]], [lut])
    (text,) = run.decode()
    for token in text[1:-1]:
        expected = model.logits((token,)).argsort(descending=True)[:3].tolist()
        assert lut.rows.token_ids[token].tolist() == expected
    assert run.stats.tokens_per_step > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_k_is_the_softmax_of_the_best(dtype):
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    top = top_k_of(logits, 4)
    truth = logits.float().softmax(-1)
    assert (top.ids.shape, top.ids.dtype, top.probabilities.dtype) == (
        (2, 3, 4),
        np.int32,
        np.float16,
    )
    picked = truth.gather(-1, torch.from_numpy(top.ids).long())
    assert torch.equal(picked, truth.topk(4, dim=-1).values)
    np.testing.assert_allclose(top.probabilities, picked.numpy(), rtol=2e-3)


def test_top_k_of_a_small_vocabulary_is_all_of_it():
    assert top_k_of(torch.tensor([[1.0, 3.0]]), 8).ids.tolist() == [[1, 0]]


def test_top_k_of_broken_logits_is_finite():
    """An overflow must not reach the tables: stock's argmax goes on, and so do we."""
    inf = float("inf")
    rows = [[inf, 0, 1], [float("nan")] * 3, [-inf] * 3, [-inf, 2, -inf]]
    top = top_k_of(torch.tensor(rows), 3)
    assert np.isfinite(top.probabilities).all()
    assert top.probabilities[3].tolist() == [1, 0, 0]
