"""vLLM with a tiny model: its texts stay, and its steps become fewer."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from eval.bench_vllm import answered
from selfspec.cache import load_cache
from tests.tiny import make_model, make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Random weights, whose greedy text soon repeats itself."""
    tokenizer, folder = make_tokenizer(), str(tmp_path / "model")
    # vLLM's attention on a CPU wants heads of 32 numbers or more.
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4}
    make_model(len(tokenizer), initializer_range=0.05, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_same_texts_in_fewer_steps(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    remember = str(tmp_path / "learned")
    options = Namespace(
        model=model, dtype="float32", tokens=5, max_new_tokens=60, cache=None, remember=remember
    )
    prompts = [list(range(first, first + 12)) for first in range(10, 70, 10)]
    plain = answered("none", prompts, 4, options)
    first = answered("selfspec", prompts, 4, options)
    again = answered("selfspec", prompts, 4, options)
    assert plain["texts"] == first["texts"] == again["texts"]
    steps = [sum(answer["num_steps"]) for answer in (plain, first, again)]
    assert steps[0] > steps[1] > steps[2]
    assert load_cache(remember).answers is not None
