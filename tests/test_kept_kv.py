"""What was read is not read again: the store against plain lists, and prompts against stock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from selfspec import ConfigError, SelfSpec, kept_kv, runner
from selfspec.compat.generation import KV
from selfspec.forward.columns import TextKV, fill
from selfspec.kept_kv import KeptText, PrefixStore, PromptLogits
from tests.fakes import attached_model, prompt
from tests.lossless.same import FIXED, MODES, assert_same_ids, assert_same_kv, few, run, slow
from tests.zoo import ARCHITECTURES

WINDOW = 5


@pytest.fixture(autouse=True)
def short_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_kv, "LEAST", 3)


def stamped(ids: Sequence[int]) -> torch.Tensor:
    """(1, 1, N, 1): numbers of which each tells all ids up to it apart, as a model's columns do."""
    stamps, last = [], 1
    for token in ids:
        last = (last * 31 + token) % 1_000_003
        stamps.append(float(last))
    return torch.tensor(stamps).view(1, 1, -1, 1)


def held_of(ids: Sequence[int], first: int) -> TextKV:
    """Those of a layer that has all, and of one with a window that has those from `first` on."""
    held = stamped(ids)
    return TextKV(
        {
            **{(0, "keys"): held, (0, "values"): -held},
            **{(1, "keys"): held[:, :, first:] + 0.5, (1, "values"): -held[:, :, first:]},
        }
    )


def empty_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(WINDOW)]
    return cache


def end_of(ids: Sequence[int], num_tokens: int, scope: Any = None) -> PromptLogits:
    return PromptLogits(num_tokens, stamped(ids)[0, 0, num_tokens - 1 : num_tokens], scope)


def assert_sound(store: PrefixStore, limit: int) -> None:
    """All bytes are counted, none is above the limit, and parents are dropped after children."""
    texts = list(store._texts)
    tensors = [
        each
        for text in texts
        for each in (*text.kv.columns.values(), text.end.logits)
        if each is not None
    ]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    num_bytes = sum(each.nbytes() for each in storages.values() if each.nbytes())
    assert num_bytes + sum(text.ids.nbytes for text in texts) == store.num_bytes <= limit
    for place, text in enumerate(texts):
        assert text.parent is None or text.parent in texts[place + 1 :]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    differs = [a != b for a, b in zip(one, other, strict=False)]
    return differs.index(True) if True in differs else len(differs)


ids_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=150)
@given(data=st.data(), windowed=st.booleans())
def test_the_store_against_plain_lists(data: st.DataObject, windowed: bool) -> None:
    store, limit, texts = PrefixStore(10**6), 10**6, list[list[int]]()
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["keep", "keep", "find", "limit"]))
        ids, scope = data.draw(ids_lists), data.draw(st.sampled_from([None, 7]))
        array = np.array(ids)
        if what == "keep":
            num_prompt = data.draw(st.integers(1, len(ids)))
            first = max(num_prompt - WINDOW + 1, 0) if windowed else 0
            store.keep(array, end_of(ids, num_prompt, scope), held_of(ids, first))
            texts.append(ids)
        elif what == "limit":
            limit = data.draw(st.sampled_from([0, 300, 700, 10**6]))
            store.limit_to(limit)
        else:
            found = store.beginning(array, scope, empty_cache())
            kept = [text for text in store._texts if text.end.scope == scope]
            most = max((shared(text.ids.tolist(), ids) for text in kept), default=0)
            if not windowed:
                whole = [text for text in kept if text.ids[: len(ids)].tolist() == ids]
                answered = any(text.answers(len(ids)) for text in whole)
                expected = most if answered else min(most, len(ids) - 1)
                least = max(kept_kv.LEAST, len(ids) // 4)
                number = 0 if found is None else found.num_columns
                assert number == (expected if expected >= least else 0)
            if found is not None:
                check_beginning(found, ids)
        assert_sound(store, limit)


def check_beginning(found: Any, ids: list[int]) -> None:
    """Reading on after it gives the cache that reading all gives."""
    number = found.num_columns
    assert kept_kv.LEAST <= number <= len(ids) - (found.logits is None)
    if found.logits is not None:
        assert torch.equal(found.logits, end_of(ids, len(ids)).logits)
    cache, whole = empty_cache(), empty_cache()
    fill(cache, found)
    for layer, more in ((0, 0.0), (1, 0.5)):
        held = stamped(ids)
        whole.update(held + more, -held, layer)
        if number < len(ids):
            cache.update(held[:, :, number:] + more, -held[:, :, number:], layer)
    assert_same_kv(cache, whole)


def test_what_is_used_again_is_kept_longest_and_kin_is_stored_once() -> None:
    store, first, other = PrefixStore(10**6), [1] * 8, [2] * 8
    store.keep(np.array(first), end_of(first, 8), held_of(first, 0))
    size = store.num_bytes
    store.keep(np.array(other), end_of(other, 8), held_of(other, 0))
    longer = [*first, 3, 4]
    store.keep(np.array(longer), end_of(longer, 10), held_of(longer, 4))
    assert store.num_bytes < 3 * size  # Only its last two columns are new.
    assert store.beginning(np.array([*longer, 9]), None, empty_cache()).num_columns == 10
    store.limit_to(store.num_bytes - 1)
    assert store.beginning(np.array([*other, 9]), None, empty_cache()) is None
    assert store.beginning(np.array([*longer, 9]), None, empty_cache()).num_columns == 10


def test_no_memory_for_a_copy_drops_all_and_a_closed_store_keeps_nothing(monkeypatch) -> None:
    store, ids = PrefixStore(10**6), [1] * 8
    store.keep(np.array(ids), end_of(ids, 8), held_of(ids, 0))

    def none_left(_held: TextKV) -> TextKV:
        raise torch.OutOfMemoryError

    more = [*ids, 2, 3]
    with monkeypatch.context() as patch:
        patch.setattr(kept_kv, "_copy", none_left)
        store.keep(np.array(more), end_of(more, 8), held_of(more, 0))
    assert store.num_bytes == 0
    store.keep(np.array(more), end_of(more, 8), held_of(more, 0))
    assert store.num_bytes > 0
    store.close()
    store.limit_to(10**6)
    store.keep(np.array(more), end_of(more, 8), held_of(more, 0))
    assert store.num_bytes == 0


@pytest.mark.parametrize("limit", [700, 10**6])
def test_an_interrupt_anywhere_leaves_the_store_sound(limit: int) -> None:
    """Before each line of the store in turn, while it keeps a text and drops others."""
    line, is_through = 0, False
    while not is_through:
        store, base, line = PrefixStore(limit), [1] * 8, line + 1
        for ids in ([2] * 6, base, [*base, 3, 4], [5] * 6):
            store.keep(np.array(ids), end_of(ids, 6), held_of(ids, 0))
        longer = [*base, 3, 4, 5, 6]
        kept = np.array(longer), end_of(longer, 9), held_of(longer, 0)
        is_through = not interrupted(line, partial(store.keep, *kept))
        assert_sound(store, limit)
    assert line > 20


def interrupted(line: int, work: Callable[[], object]) -> bool:
    """Was some work interrupted before so many lines of `kept_kv` had run?"""
    left = line

    def tracer(frame: Any, event: str, _arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != kept_kv.__file__:
            return None
        left -= event == "line"
        if event == "line" and not left:
            raise KeyboardInterrupt
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_no_memory_to_join_columns_drops_all_and_reads_all(monkeypatch) -> None:
    model, inputs = attached_model(), prompt(1, 20)
    spec = SelfSpec(**FIXED, kept_kv="1GB")
    kept_after(spec, model, inputs)
    longer = with_more(inputs, 6)
    kept_after(spec, model, longer)

    def none_left(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(KeptText, "pieces", none_left)
        assert kept_after(spec, model, longer) == 0
    assert kept_after(spec, model, longer) == longer["input_ids"].shape[1]


def test_an_error_while_a_store_is_made_is_no_verdict(monkeypatch) -> None:
    model, inputs, spec = attached_model(), prompt(1, 20), SelfSpec(**FIXED, kept_kv="1%")

    def broken(*_: Any) -> int:
        raise OSError("no such file")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "free_memory", broken)
        with pytest.raises(OSError, match="no such file"):
            kept_after(spec, model, inputs)
    assert kept_after(spec, model, inputs) == 0
    assert kept_after(spec, model, inputs) == 20


def test_a_long_line_of_turns_begins_anew(monkeypatch) -> None:
    monkeypatch.setattr(kept_kv, "_MOST_PARENTS", 3)
    store, ids = PrefixStore(10**6), [1] * 4
    for turn in range(12):
        ids = [*ids, turn, turn]
        store.keep(np.array(ids), end_of(ids, len(ids)), held_of(ids, 0))
        assert max(len(text.line) for text in store._texts) <= 4
        assert store.beginning(np.array([*ids, 9]), None, empty_cache()).num_columns == len(ids)


def test_a_running_text_is_a_source_and_not_counted() -> None:
    store, ids = PrefixStore(0), [1] * 8
    running = KeptText(np.array(ids), end_of(ids, 8), held_of(ids, 0))
    found = store.beginning(np.array(ids), None, empty_cache(), [running])
    assert (found.num_columns, store.num_bytes) == (8, 0)
    check_beginning(found, ids)


def test_states_serve_only_what_goes_on_from_their_place() -> None:
    ids, state = [1] * 8, torch.ones(1, 2, 3)
    cache = empty_cache()
    cache.layers.append(LinearAttentionLayer())
    store = PrefixStore(10**6)
    store.keep(np.array(ids), end_of(ids, 8), held_of(ids, 0))
    assert store.beginning(np.array([*ids, 2]), None, cache) is None  # It has none.
    longer = [*ids, 3]
    states = {(2, "recurrent_states", 0): state}
    store.keep(np.array(longer), end_of(longer, 9), held_of(longer, 0)._replace(states=states))
    assert store.beginning(np.array([*ids, 2, 2]), None, cache) is None
    assert store.beginning(np.array([*longer, 2]), None, cache).num_columns == 9


@pytest.mark.parametrize("value", ["much", -1, "120GBs", True, 2.5])
def test_the_knob_is_a_size_a_share_or_nothing(value: Any) -> None:
    with pytest.raises(ConfigError, match="kept_kv"):
        SelfSpec(kept_kv=value)
    assert [SelfSpec(kept_kv=right).config.kept_kv for right in (None, 0, "2GB", "25%")]


OTHERS = (prompt(1, 30, seed=5), prompt(1, 45, seed=6))


def with_more(inputs: dict[str, Any], number: int, seed: int = 9) -> dict[str, Any]:
    ids = torch.cat([inputs["input_ids"], prompt(1, number, seed=seed)["input_ids"]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def cut(inputs: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: each[:, :number] for name, each in inputs.items()}


@pytest.mark.parametrize("mode", ["sample", slow("greedy")])
@pytest.mark.parametrize("name", few(ARCHITECTURES))
def test_a_prompt_after_each_of_several_others(name: str, mode: str) -> None:
    """Its text and its KV are stock's, whatever was read before it."""
    model, asked = attached_model(name), prompt(1, 40, seed=3)
    options = {**MODES[mode], "return_dict_in_generate": True, "max_new_tokens": 9}
    stock = run(model, asked, **options)
    before = (
        cut(asked, 20),
        with_more(cut(asked, 25), 11),
        asked,
        with_more({"input_ids": stock.ids}, 6),
        *OTHERS,
    )
    spec = SelfSpec(**FIXED, kept_kv="1GB")
    for inputs in before:
        run(model, inputs, custom_generate=spec, **options)
        ours = run(model, asked, custom_generate=spec, **options)
        assert_same_ids(ours.ids, stock.ids)
        if spec.stats.num_prompt_tokens_kept:
            assert_same_kv(getattr(ours.output, KV), getattr(stock.output, KV))
        reason = spec.stats.kept_reason or spec.stats.mode == "plain"
        assert spec.stats.num_prompt_tokens_kept == 0 or not reason


def kept_after(spec: SelfSpec, model: Any, inputs: dict[str, Any], **options: Any) -> int:
    """How many tokens of a prompt were not read; its text is stock's."""
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    stock = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, assistant=spec)
    assert torch.equal(ours, stock)
    return spec.stats.num_prompt_tokens_kept


def test_a_chat_reads_each_turn_alone() -> None:
    model, spec, inputs = attached_model(), SelfSpec(**FIXED, kept_kv="1GB"), prompt(1, 20)
    for turn in range(4):
        kept = kept_after(spec, model, inputs)
        assert kept == (inputs["input_ids"].shape[1] - 1 if turn else 0)
        assert kept_after(spec, model, inputs) == inputs["input_ids"].shape[1]
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        inputs = with_more({"input_ids": ids[:, :-1]}, 2, seed=turn)
        inputs = {name: each[:, :-1] for name, each in inputs.items()}


def test_sequences_of_one_prompt_go_on_after_what_was_read() -> None:
    model, inputs, spec = attached_model(), prompt(1, 20), SelfSpec(**FIXED, kept_kv="1GB")
    kept_after(spec, model, inputs)
    options = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    for _ in range(2):
        torch.manual_seed(5)
        stock = model.generate(**inputs, **options)
        torch.manual_seed(5)
        ours = model.generate(**inputs, **options, assistant=spec)
        assert torch.equal(ours, stock)
        assert spec.stats.num_prompt_tokens_kept == 20


def test_forgetting_drops_what_was_read() -> None:
    model, inputs, spec = attached_model(), prompt(1, 20), SelfSpec(**FIXED, kept_kv="1GB")
    kept_after(spec, model, inputs)
    assert spec.runner(model).kept_kv_bytes > 0
    spec.forget()
    assert spec.runner(model).kept_kv_bytes == 0
    assert kept_after(spec, model, inputs) == 0


def _complex() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).to(torch.complex64)


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8),
    "conjugated": lambda: _complex().conj(),
    "negated": lambda: _complex().conj().imag,
    "not contiguous": lambda: torch.arange(6.0).view(2, 3).T,
    "one value for all": lambda: torch.ones(1).expand(4),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_all_kinds_keep_what_was_read(kind: str) -> None:
    model, inputs, spec = attached_model(), prompt(1, 20), SelfSpec(**FIXED, kept_kv="1GB")
    model.register_buffer("extra", BUFFERS[kind]())
    assert kept_after(spec, model, inputs) == 0
    assert kept_after(spec, model, inputs) == 20
    model.extra.data[0] = 3
    assert kept_after(spec, model, inputs) == 0
