"""What breaks off in the middle propagates, and leaves the model and the memory fit for use."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from selfspec import SelfSpec
from selfspec.compat.generation import KV
from tests.fakes import of_library, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    NUM_COLUMNS,
    NUM_NEW,
    Call,
    assert_begins,
    assert_clean,
    assert_same_ids,
    doubting,
    recorded_forwards,
    run,
    run_both,
    slow,
)
from tests.lossless.test_same_streamers import Recorder


class Broken(Exception):
    """Raised on purpose."""


class Fuse:
    """Raises `error` at the n-th time."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        self._error = error
        self._left = at
        self.num_burnt = 0

    def burn(self) -> None:
        self._left -= 1
        self.num_burnt += 1
        if self._left == 0:
            raise self._error("on purpose")

    def process(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.burn()
        return scores

    def stop(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.burn()
        return torch.zeros(len(ids), dtype=torch.bool)


class Told(Recorder):
    """A streamer that may break off."""

    def __init__(self, fuse: Fuse | None) -> None:
        super().__init__()
        self._fuse = fuse

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if self._fuse is not None:
            self._fuse.burn()


PLACES = {
    "criterion": lambda fuse: {"stopping_criteria": [fuse.stop]},
    "processor": lambda fuse: {"logits_processor": [fuse.process]},
    "streamer": lambda fuse: {"streamer": Told(fuse)},
}


@pytest.mark.parametrize("at", [slow(1), 2, slow(9)])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("name", "place"), [*(("mistral", place) for place in PLACES), ("bloom", "processor")]
)
def test_an_error_from_outside(
    name: str, place: str, error: type[BaseException], at: int, call: Call
) -> None:
    """The second model gets chains."""
    model, inputs = tiny_model(name), call.inputs
    spec = SelfSpec()
    kv = DynamicCache(config=model.config)
    extra = PLACES[place](Fuse(error, at))
    with pytest.raises(error, match="on purpose"):
        run(model, inputs, custom_generate=spec, **{KV: kv}, **extra, **call.options)
    assert_clean(model)
    assert_usable(kv)
    assert place != "streamer" or len(extra["streamer"].told) == at
    run_both(model, inputs, spec, drafts=name != "bloom", **call.options)


def assert_usable(kv: DynamicCache) -> None:
    """Stock layers of one length, as after some plain steps."""
    assert {type(layer) for layer in kv.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    assert len({layer.get_seq_length() for layer in kv.layers}) <= 1


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, place) for name in ("bloom", "llama") for place in (*PLACES, "layer")),
        *((name, "layer") for name in ("lfm2", "gemma3")),
        *(slow(name, place) for name in ("lfm2", "gemma3") for place in PLACES),
        *(slow("falcon-alibi", place) for place in (*PLACES, "layer")),
    ],
)
def test_a_cache_holds_no_column_that_was_not_committed(name: str, place: str) -> None:
    """Of trees and of chains; a forward that breaks off has grown the first layers alone."""
    model, inputs = tiny_model(name), prompt()
    whole_kv = DynamicCache(config=model.config)
    whole = run(model, inputs, **{KV: whole_kv}, **GREEDY).ids
    for at in (2, 4, 6):
        kv, fuse = DynamicCache(config=model.config), Fuse(KeyboardInterrupt, at)
        spec, extra = doubting(whole, inputs, seed=at), {}
        with ExitStack() as stack:
            if place == "layer":
                last, lit = [m for m in model.modules() if type(m).__name__.endswith("MLP")][-1], []
                hook = last.register_forward_pre_hook(
                    of_library(lambda *_, fuse=fuse, lit=lit: fuse.burn() if lit else None)
                )
                stack.callback(hook.remove)
                spec.support(model)  # A new hook is tried before, and the fuse burns in the call.
                lit.append(True)
            else:
                extra = PLACES[place](fuse)
            stack.enter_context(pytest.raises(KeyboardInterrupt))
            run(model, inputs, custom_generate=spec, **{KV: kv}, **extra, **GREEDY)
        assert_begins(kv, whole_kv)
        num_known = kv.get_seq_length()
        num_told = NUM_COLUMNS + fuse.num_burnt
        assert num_known < num_told if place != "layer" else num_known >= NUM_COLUMNS
        ids = whole[:, : num_known + 1]  # One of them may be the pad token, which hides nothing.
        so_far = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        left = {KV: kv, "max_new_tokens": NUM_NEW + NUM_COLUMNS - num_known - 1}
        assert_same_ids(run(model, so_far, **left, **GREEDY).ids, whole)


class ScarceTorch:
    """What transformers' caches call torch; memory ends at the n-th joining of columns."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def cat(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._left -= 1
        if not self._left:
            raise torch.OutOfMemoryError("on purpose")
        return torch.cat(*args, **kwargs)


@pytest.mark.parametrize("name", ["bloom", "inkling", "qwen4"])
def test_memory_that_ends_within_a_layer_of_the_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chains: where it has new keys and no new values, or has counted columns alone."""
    model, inputs = tiny_model(name), prompt()
    whole = run(model, inputs, **GREEDY).ids
    for at in range(20, 32):
        kv, spec = DynamicCache(config=model.config), doubting(whole, inputs, seed=at)
        spec.support(model)
        with monkeypatch.context() as patch, ExitStack() as stack:
            patch.setattr(cache_utils, "torch", ScarceTorch(at))
            stack.enter_context(pytest.raises(torch.OutOfMemoryError))
            run(model, inputs, custom_generate=spec, **{KV: kv}, **GREEDY)
        (num_known,) = {x.get_seq_length() for x in kv.layers if hasattr(x, "get_seq_length")}
        ids = whole[:, : num_known + 1]
        so_far = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        left = {KV: kv, "max_new_tokens": NUM_NEW + NUM_COLUMNS - num_known - 1}
        assert_same_ids(run(model, so_far, **left, **GREEDY).ids, whole)


def test_a_call_that_breaks_off_is_counted() -> None:
    model, spec = tiny_model(), SelfSpec()
    extra = PLACES["criterion"](Fuse(Broken, 9))
    with recorded_forwards(model), pytest.raises(Broken):
        run(model, prompt(), custom_generate=spec, **extra, **GREEDY)
    assert spec.stats.num_calls == 1
    assert 0 < spec.stats.num_new_tokens <= 9
