"""`eval tokens_per_step`, end to end on a tiny random model."""

from __future__ import annotations

import numpy as np
import pytest

from eval.methods.switch import SwitchSource
from selfspec.records import TopK


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_tokens_per_step(figures, asked, temperature):
    asked += ["--max-nodes", "1", "8", "--max-new-tokens", "12", "--limit", "3"]
    asked += ["--temperature", temperature, "--knob", "max_depth=9"]
    result = figures("tokens_per_step", *asked)
    assert result["num_prompts"] == 3
    assert result["rows"]["1"]["overall"] == [1.0, 1.0]  # plain decoding
    tokens, nodes = result["rows"]["8"]["overall"]
    assert tokens >= 1
    assert 1 < nodes <= 8


def test_a_later_run_starts_with_what_an_earlier_one_kept(figures, asked, tmp_path):
    asked += ["--max-nodes", "8", "--max-new-tokens", "12", "--limit", "2"]
    asked += ["--remember", str(tmp_path / "kept")]
    cold, warm = (figures("tokens_per_step", *asked)["rows"]["8"]["overall"] for _ in range(2))
    assert warm[0] > cold[0]


def test_the_switch_copies_a_long_match_and_else_asks_the_lut():
    span = [1, 2, 3, 4, 5, 6, 7]
    source = SwitchSource(2)
    source.observe_pairs(
        np.array([[-1, 5]]), TopK(np.array([[9, 8]]), np.array([[0.5, 0.3]], np.float16))
    )
    long = source.open([*span, 0, *span[:5]], learns=True)
    assert [token for token, _ in long.expand(long.root())] == [6]
    assert long.expand(long.root())[0][1].source == "match"
    short = source.open([*span, 0, 5], learns=True)
    assert [token for token, _ in short.expand(short.root())] == [9, 8]
    assert [kind.rank for _, kind in short.expand(short.root())] == [1, 2]
