"""Chains for models with running states: texts, caches and states are those of plain decoding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec import SelfSpec
from selfspec.ability.chain_trials import check_chain
from selfspec.ability.probe import probe
from selfspec.ability.trial_layers import TrialLayers
from selfspec.compat.branching import state_functions
from selfspec.compat.generation import KV, kv_of, update_arguments
from selfspec.compat.states import columns_of, states_of
from selfspec.forward.chains import ChainBackend, KeptStates
from selfspec.forward.prompt import Prefilled
from tests.fakes import FutureSource, new_model, of_library, prompt, tiny_model
from tests.lossless.same import (
    FIXED,
    GREEDY,
    MODES,
    NUM_COLUMNS,
    doubting,
    knowing,
    recorded_forwards,
    run,
    run_both,
    slow,
    texts_of,
)
from tests.strategies import tree_of

# States beside attention that does not branch.
FAMILIES = ["qwen4"]
# A backend of chains serves these too. The second writes to its states in place.
ANY = ["qwen3-next", "bamba"]


def failing(ids: torch.Tensor, inputs: dict[str, Any]) -> SelfSpec:
    """A `SelfSpec` that drafts wrong tokens only."""
    source = FutureSource(texts_of(ids, inputs), doubt=1.0)
    return SelfSpec(extra_sources=[source], **{**FIXED, "sources": (), "max_nodes": 5})


def assert_same_cache(ours: Any, stock: Any) -> None:
    """The same text was read, and keys, values and states are the same but for rounding."""
    assert columns_of(ours) == columns_of(stock)
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        assert type(mine) is type(theirs)
        assert vars(mine).keys() == vars(theirs).keys()
        for name, held in vars(theirs).items():
            if isinstance(held, (bool, int)):
                assert getattr(mine, name) == held
            if name in ("keys", "values"):
                torch.testing.assert_close(getattr(mine, name), held, rtol=1e-3, atol=1e-4)
    pairs = zip(states_of(ours), states_of(stock), strict=True)
    for (mine, index), (theirs, same) in pairs:
        torch.testing.assert_close(mine[index], theirs[same], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_rows", [slow(1), 3])
@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        *((doubting, "sample"), (knowing, "greedy"), (failing, "greedy")),
        *(slow(*case) for case in ((doubting, "greedy"), (knowing, "sample"), (failing, "sample"))),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_and_caches(name: str, spec: Any, num_rows: int, mode: str) -> None:
    """With a cache that is handed in and one that is handed out, which both hold all."""
    model, inputs = tiny_model(name), prompt(num_rows)
    options = {"drafts": False, **MODES[mode]}
    both = run_both(
        model, inputs, spec, fresh=lambda: {KV: DynamicCache(config=model.config)}, **options
    )
    assert both.stats.num_nodes > both.stats.num_steps
    assert (both.stats.num_read_again > 0) == (spec is not knowing)
    assert_same_cache(both.our_extras[KV], both.stock_extras[KV])
    both = run_both(model, inputs, spec, return_dict_in_generate=True, **options)
    assert_same_cache(kv_of(both.ours.output), kv_of(both.stock.output))


@pytest.mark.parametrize("length", [1, slow(2), 3, slow(5), 9])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_may_end_anywhere(name: str, length: int) -> None:
    model, inputs = tiny_model(name), prompt()
    asked = {"max_new_tokens": length, "return_dict_in_generate": True, **GREEDY}
    whole = run(model, inputs, **GREEDY).ids
    for seed in range(2):
        both = run_both(model, inputs, doubting(whole, inputs, seed=seed), drafts=False, **asked)
        assert_same_cache(kv_of(both.ours.output), kv_of(both.stock.output))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_accepted_is_read_again_with_the_next_forward(name: str) -> None:
    """And never in one of its own, unless the cache is given to somebody."""
    model, inputs = tiny_model(name), prompt()
    whole = run(model, inputs, **GREEDY).ids
    spec = doubting(whole, inputs)
    with recorded_forwards(model) as widths:
        run(model, inputs, custom_generate=spec, **GREEDY)
    stats = spec.stats
    after = widths[widths.index(NUM_COLUMNS) + 1 :]
    assert len(after) == stats.num_steps
    assert sum(after) == stats.num_nodes + stats.num_read_again
    assert max(after) <= NUM_COLUMNS


class Chain:
    """A backend behind a prompt, with the text that goes on plainly."""

    def __init__(self, name: str, num_rows: int = 1) -> None:
        self.model, self.inputs = tiny_model(name), prompt(num_rows)
        inputs = self.inputs
        output = run(self.model, inputs, return_dict_in_generate=True, **GREEDY).output
        self.text = output.sequences[:, NUM_COLUMNS:].tolist()
        self.cache = DynamicCache(config=self.model.config)
        mask = inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        arguments[KV] = self.cache
        with torch.no_grad():
            read = self.model(inputs["input_ids"], **arguments)
        kwargs = update_arguments(self.model, arguments, outputs=read)
        self.backend = ChainBackend(self.model)
        self.backend.admit(Prefilled(inputs["input_ids"], kwargs, read.logits))
        self.at = 0

    @torch.no_grad()
    def step(self, num_right: int, num_wrong: int) -> None:
        """Drafts right tokens, then wrong ones; the model must say what it says plainly."""
        end = self.at + 1 + num_right
        chains = [row[self.at : end] + [row[end] % 90 + 1] * num_wrong for row in self.text]
        trees = [tree_of(range(-1, len(chain) - 1), chain) for chain in chains]
        told = self.backend.forward(self.backend.lay_out([], trees)).logits.argmax(-1)
        assert told.shape[1] == len(chains[0])
        assert told[:, : num_right + 1].tolist() == [
            row[self.at + 1 : end + 1] for row in self.text
        ]
        self.backend.commit([list(range(num_right + 1))] * len(chains))
        self.at = end

    def plain_cache(self) -> DynamicCache:
        """What the cache of plain decoding holds here."""
        cache = DynamicCache(config=self.model.config)
        run(self.model, self.inputs, max_new_tokens=self.at + 1, **{KV: cache}, **GREEDY)
        return cache


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ANY)
def test_steps_of_any_kind_in_any_order(name: str, num_rows: int) -> None:
    dice = random.Random(5)
    for _ in range(6):
        chain, pending = Chain(name, num_rows), 0
        for _ in range(dice.randrange(1, 6)):
            assert chain.backend.num_pending == pending
            assert chain.backend.front == NUM_COLUMNS + chain.at
            assert chain.backend.max_width(16) == 16 - pending
            right, wrong = dice.randrange(3), dice.choice([0, 0, 1, 3])
            chain.step(right, wrong)
            pending = pending + right + 1 if wrong else 0
            assert columns_of(chain.cache) == NUM_COLUMNS + chain.at - pending
        chain.backend.release()
        assert_same_cache(chain.cache, chain.plain_cache())


@pytest.mark.parametrize("name", ANY)
def test_a_chain_is_one_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's own functions would pad it to the chunks of a prompt."""
    chain, sizes = Chain(name), []
    for module, function in state_functions(chain.model):
        if "chunk" in function:
            stock = getattr(module, function)

            def watched(*args: Any, stock: Any = stock, **kwargs: Any) -> Any:
                sizes.append((args[0].shape[1], kwargs["chunk_size"]))
                return stock(*args, **kwargs)

            monkeypatch.setattr(module, function, watched)
    chain.step(1, 2)
    chain.step(0, 1)
    assert [number for number, _ in sizes] == [size for _, size in sizes] == [4, 4]


@pytest.mark.parametrize("fills", [True, False])
def test_nothing_is_read_for_nobody(fills: bool) -> None:
    chain = Chain("qwen3-next")
    chain.step(1, 2)
    with recorded_forwards(chain.model) as widths, torch.no_grad():
        chain.backend.release(fills=fills)
    assert widths == [2] * fills


class Interrupt(Exception):
    """Breaks a forward off."""


@pytest.mark.parametrize("num_wrong", [0, 2])
@pytest.mark.parametrize("name", ANY)
def test_a_forward_that_breaks_off_leaves_what_is_committed(name: str, num_wrong: int) -> None:
    """Behind its first layer; also a plain step over a cache of the caller's."""
    chain = Chain(name)
    chain.backend._keeps_always = True
    chain.step(1, 1)
    chain.step(0, num_wrong)
    first = next(m for m in chain.model.modules() if isinstance(m, torch.nn.ModuleList))[0]

    def break_off(*_: Any) -> None:
        handle.remove()
        raise Interrupt

    handle = first.register_forward_hook(break_off)
    with pytest.raises(Interrupt):
        chain.step(1, num_wrong)
    with torch.no_grad():
        chain.backend.release()
    assert_same_cache(chain.cache, chain.plain_cache())


def forgets(model: Any, kinds: tuple[str, ...]) -> Any:
    """The model, whose forwards over several tokens begin without some states."""

    @of_library
    def forget(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        kv = kv_of(kwargs)
        if kv is not None and kwargs["input_ids"].shape[1] > 1:
            for held, index in states_of(kv, kinds):
                held[index].zero_()

    model.register_forward_pre_hook(forget, with_kwargs=True)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("recurrent_states",), "one without its recurrent states"),
        (("conv_states",), "one without its convolution's window"),
        (("conv_states", "recurrent_states"), "one without its states"),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_reads_on_wrongly_is_decoded_plainly(
    name: str, kinds: tuple[str, ...], said: str, dtype: torch.dtype
) -> None:
    model = new_model(name, dtype=dtype)
    assert probe(model).mode == "chain"
    ability = probe(forgets(model, kinds))
    assert ability.mode == "plain"
    assert said in ability.reason or "with it several tokens" in ability.reason


def test_chains_that_limit_what_steps_do_not_are_found_out() -> None:
    """As with forwards of Mamba 2 that let no time step be too short."""
    model = new_model("bamba")
    mixer = next(m for m in model.modules() if hasattr(m, "time_step_limit"))
    mixer.time_step_limit = (0.5, float("inf"))
    reason = check_chain(model, range(3, 13), TrialLayers(), ())
    assert reason == "a forward over several tokens bounds its time steps, and plain steps do not"


class Stumbling(dict[Any, Any]):
    """States of a layer; an interrupt comes before the first one is put back."""

    has_stumbled = False

    def __setitem__(self, key: Any, state: Any) -> None:
        if not self.has_stumbled:
            self.has_stumbled = True
            raise KeyboardInterrupt
        super().__setitem__(key, state)


def test_an_interrupt_while_states_go_back_puts_none_back_twice():
    model = tiny_model("bamba")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompt(1, 5), **{KV: cache}, use_cache=True)
        layer = next(layer for layer in cache.layers if hasattr(layer, "conv_states"))
        layer.conv_states = Stumbling(layer.conv_states)
        layer.recurrent_states = Stumbling(layer.recurrent_states)
        places = states_of(cache)
        kept = [held[key].clone() for held, key in places]
        states = KeptStates(cache)
        states.keep()
        model(prompt(1, 3)["input_ids"], **{KV: cache}, use_cache=True)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            states.go_back()
    states.go_back()
    assert all(
        torch.equal(held[key], state) for (held, key), state in zip(places, kept, strict=True)
    )
