"""What breaks off in the middle propagates, and leaves the model and the memory fit for use."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from selfspec import SelfSpec
from selfspec.compat.generation import KV, kv_of
from tests.fakes import of_library, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    NUM_COLUMNS,
    NUM_NEW,
    Call,
    assert_clean,
    assert_same_ids,
    assert_same_kv,
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
@pytest.mark.parametrize(
    ("name", "place"), [*(("mistral", place) for place in PLACES), ("bloom", "processor")]
)
def test_an_error_from_outside(name: str, place: str, at: int, call: Call) -> None:
    """The second model gets chains."""
    model, inputs = tiny_model(name), call.inputs
    spec = SelfSpec()
    kv = DynamicCache(config=model.config)
    extra = PLACES[place](Fuse(Broken, at))
    with pytest.raises(Broken, match="on purpose"):
        run(model, inputs, custom_generate=spec, **{KV: kv}, **extra, **call.options)
    assert_clean(model)
    assert_usable(kv)
    assert place != "streamer" or len(extra["streamer"].told) == at
    run_both(model, inputs, spec, drafts=name != "bloom", **call.options)


def assert_usable(kv: DynamicCache) -> None:
    """Stock layers of one length, as after some plain steps."""
    assert {type(layer) for layer in kv.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    assert len({layer.get_seq_length() for layer in kv.layers}) <= 1


ANY_PLACE = (*PLACES, "layer")
OTHERS = ("qwen3-5", "falcon-h1", "qwen4", "lfm2", "gemma3")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, place) for name in ("bloom", "llama") for place in ANY_PLACE),
        *((name, "layer") for name in OTHERS),
        ("qwen3-5", "processor"),
        *(slow(name, place) for name in OTHERS[1:] for place in PLACES),
        *(slow("falcon-alibi", place) for place in ANY_PLACE),
    ],
)
def test_an_interrupt_leaves_the_cache_of_a_beginning(name: str, place: str) -> None:
    """Of trees and of chains, with states and without: the one that stock would have left there.

    A forward that breaks off has grown the first layers alone.
    """
    model, inputs = tiny_model(name), prompt()
    whole = run(model, inputs, **GREEDY).ids
    for at in (2, 5):
        kv, fuse = DynamicCache(config=model.config), Fuse(KeyboardInterrupt, at)
        interrupted(model, inputs, place, fuse, doubting(whole, inputs, seed=at), **{KV: kv})
        num_known = kv.get_seq_length() - NUM_COLUMNS
        assert num_known < fuse.num_burnt if place != "layer" else num_known >= 0
        returned = {"max_new_tokens": num_known + 1, "return_dict_in_generate": True, **GREEDY}
        assert_same_kv(kv, kv_of(run(model, inputs, **returned).output))
        assert_goes_on(model, kv, whole)


def interrupted(
    model: Any, inputs: dict[str, Any], place: str, fuse: Fuse, spec: SelfSpec, **options: Any
) -> None:
    """A call that a user breaks off, at the n-th token or in the midst of the n-th forward."""
    layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    lit: list[bool] = []
    hook = layers[-1].register_forward_pre_hook(of_library(lambda *_: fuse.burn() if lit else None))
    spec.support(model)  # A new hook is tried before, and the fuse burns in the call.
    if place == "layer":
        lit.append(True)
    else:
        options |= PLACES[place](fuse)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(model, inputs, custom_generate=spec, **options, **GREEDY)
    finally:
        hook.remove()


def assert_goes_on(model: Any, kv: DynamicCache, whole: torch.Tensor) -> None:
    """From all columns of a cache, which are as many in each layer, stock writes the same text."""
    (num_known,) = {x.get_seq_length() for x in kv.layers if hasattr(x, "get_seq_length")}
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
    for at in range(20, 28):
        kv, spec = DynamicCache(config=model.config), doubting(whole, inputs, seed=at)
        spec.support(model)
        with monkeypatch.context() as patch, ExitStack() as stack:
            patch.setattr(cache_utils, "torch", ScarceTorch(at))
            stack.enter_context(pytest.raises(torch.OutOfMemoryError))
            run(model, inputs, custom_generate=spec, **{KV: kv}, **GREEDY)
        assert_goes_on(model, kv, whole)


def test_a_call_that_breaks_off_is_counted() -> None:
    model, spec = tiny_model(), SelfSpec()
    extra = PLACES["criterion"](Fuse(Broken, 9))
    with recorded_forwards(model), pytest.raises(Broken):
        run(model, prompt(), custom_generate=spec, **extra, **GREEDY)
    assert spec.stats.num_calls == 1
    assert 0 < spec.stats.num_new_tokens <= 9
