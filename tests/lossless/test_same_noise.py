"""Drafts that look at the random numbers to come: texts and generators stay those of stock."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from selfspec import SelfSpec
from selfspec.verify.tape import NoiseTape
from tests.fakes import prompt, tiny_model
from tests.lossless.same import FIXED, SAMPLE, assert_same_ids, run, run_both, some
from tests.lossless.test_same_failures import Fuse, Told

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}


@pytest.fixture
def peeked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever noise to come is told."""
    depths: list[int] = []
    peek = NoiseTape.peek

    def told(self: NoiseTape, row: int, depth: int) -> Any:
        noise = peek(self, row, depth)
        depths.extend([depth] * (noise is not None))
        return noise

    monkeypatch.setattr(NoiseTape, "peek", told)
    return depths


def learned() -> SelfSpec:
    """One that drafts from tables, and so peeks at what they name."""
    return SelfSpec(**FIXED)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("options", [SAMPLED, SAMPLE], ids=["pure", "warped"])
@pytest.mark.parametrize("seed", some(range(4)))
def test_texts_are_those_of_stock(peeked, num_rows, options, seed):
    run_both(tiny_model("llama"), prompt(num_rows), learned(), seed=seed, **options)
    assert len(peeked) > 5
    assert max(peeked) > 0


class Drawing(LogitsProcessor):
    """Draws from the global generator at some of its calls, as a user's own may."""

    is_row_wise = True

    def __init__(self, share: float) -> None:
        self._dice, self._share = random.Random(1), share

    def __call__(self, input_ids, scores):
        if self._dice.random() < self._share:
            torch.rand(3)
        return scores


@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("seed", some(range(4)))
def test_a_processor_that_draws_itself_spoils_no_text(peeked, share, seed):
    fresh = lambda: {"logits_processor": LogitsProcessorList([Drawing(share)])}  # noqa: E731
    run_both(tiny_model("llama"), prompt(1), learned(), seed=seed, fresh=fresh, **SAMPLED)


class DrawingStreamer:
    """Draws between the tokens; or seeds the generator anew, which repeats noise."""

    def __init__(self, number: int) -> None:
        self._number, self._count = number, 0

    def put(self, value: torch.Tensor) -> None:
        self._count += 1
        if self._count == self._number:
            torch.manual_seed(11)
        elif self._count > self._number:
            torch.rand(self._count % 3)

    def end(self) -> None: ...


@pytest.mark.parametrize("number", [1, 4, 12])
def test_user_code_that_draws_between_tokens_spoils_no_text(peeked, number):
    fresh = lambda: {"streamer": DrawingStreamer(number)}  # noqa: E731
    run_both(tiny_model("llama"), prompt(1), learned(), fresh=fresh, **SAMPLED)
    assert peeked or number == 1


def test_beside_another_thread_texts_are_those_of_stock(peeked):
    """Where another thread is alive, each number is drawn when its token is."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        run_both(tiny_model("llama"), prompt(1), learned(), **SAMPLED)
    finally:
        stop.set()
        thread.join()
    assert len(peeked) > 5


def test_after_an_interrupt_the_generator_has_moved_for_committed_tokens_alone(peeked):
    """A streamer that breaks off after 9 tokens: the state is that of stock's loop there."""
    model, states = tiny_model("llama"), []
    for extra in ({}, {"custom_generate": learned()}):
        breaks_off = Told(Fuse(KeyboardInterrupt, 10))
        with pytest.raises(KeyboardInterrupt):
            run(model, prompt(1), seed=2, streamer=breaks_off, **extra, **SAMPLED)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert len(peeked) > 1
    # The next call is as if nothing had been.
    assert_same_ids(
        run(model, prompt(1), custom_generate=learned(), **SAMPLED).ids,
        run(model, prompt(1), **SAMPLED).ids,
    )
