"""Chains of models with running states: texts, caches and states are those of plain decoding."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec import UnsupportedError
from selfspec.ability.chain_trials import check_chain
from selfspec.ability.probe import probe
from selfspec.ability.trial_layers import TrialLayers
from selfspec.compat.generation import KV, kv_of, update_arguments
from selfspec.compat.states import columns_of, state_functions, states_by_place
from selfspec.forward.chains import ChainBackend
from selfspec.forward.prompt import Prefilled
from selfspec.forward.states import slots
from tests.fakes import new_model, of_library, prompt, tiny_model
from tests.lossless.same import (
    GREEDY,
    NUM_COLUMNS,
    doubting,
    recorded_forwards,
    run,
    slow,
)
from tests.strategies import tree_of

# States beside attention that does not branch, and a convolution of another kind.
QWEN = "qwen4"
# A backend of chains serves these too. Plain steps of the second write to states in place.
ANY = ["qwen3-next", "bamba", QWEN]


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
    states = states_by_place(ours.layers), states_by_place(stock.layers)
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


def test_no_token_is_read_twice() -> None:
    """After a wrong guess neither, nor at the end of the text."""
    model, inputs = tiny_model(QWEN), prompt()
    spec = doubting(run(model, inputs, **GREEDY).ids, inputs)
    with recorded_forwards(model) as widths:
        run(model, inputs, custom_generate=spec, return_dict_in_generate=True, **GREEDY)
    after = widths[widths.index(NUM_COLUMNS) + 1 :]
    assert len(after) == spec.stats.num_steps
    assert sum(after) == spec.stats.num_nodes


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
        functions = state_functions(self.model.modules())
        self.backend = ChainBackend(self.model, functions=functions)
        self.prompt = Prefilled(inputs["input_ids"], kwargs, read.logits)
        self.backend.admit(self.prompt)
        self.at = 0

    @torch.no_grad()
    def step(self, num_right: int, num_wrong: int) -> None:
        """Drafts right tokens, then wrong ones; the model must say what it says plainly."""
        end = self.at + 1 + num_right
        chains = [row[self.at : end] + [row[end] % 90 + 1] * num_wrong for row in self.text]
        trees = [tree_of(range(-1, len(chain) - 1), chain) for chain in chains]
        told = self.backend.lay_out([], trees)().argmax(-1)
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


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [*((name, 1) for name in ANY), ("qwen3-next", 3), ("bamba", 3)],  # Rows that stop in no text.
)
def test_steps_of_any_kind_in_any_order(name: str, num_rows: int) -> None:
    dice = random.Random(5)
    for _ in range(6):
        chain = Chain(name, num_rows)
        for _ in range(dice.randrange(1, 6)):
            assert chain.backend.tree_start == NUM_COLUMNS + chain.at
            assert chain.backend.max_width(16) == 16
            chain.step(dice.randrange(3), dice.choice([0, 0, 1, 3]))
            assert columns_of(chain.cache) == NUM_COLUMNS + chain.at
        chain.backend.release()
        assert_same_cache(chain.cache, chain.plain_cache())


@pytest.mark.parametrize("num_wrong", [0, 2])
@pytest.mark.parametrize("name", ANY)
def test_a_forward_that_breaks_off_leaves_what_is_committed(name: str, num_wrong: int) -> None:
    """Behind its first layer; the next forward goes on from there."""
    chain = Chain(name)
    chain.step(1, 1)
    chain.step(0, num_wrong)
    first = next(m for m in chain.model.modules() if isinstance(m, torch.nn.ModuleList))[0]

    def break_off(*_: Any) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = first.register_forward_hook(break_off)
    with pytest.raises(KeyboardInterrupt):
        chain.step(1, num_wrong)
    chain.step(1, num_wrong)
    chain.backend.release()
    assert_same_cache(chain.cache, chain.plain_cache())


def forgets(model: Any, kinds: tuple[str, ...]) -> Any:
    """The model, whose forwards over several tokens begin without some states."""

    @of_library
    def forget(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        kv = kv_of(kwargs)
        if kv is not None and kwargs["input_ids"].shape[1] > 1:
            for (_, name, _), state in states_by_place(kv.layers).items():
                if name in kinds:
                    state.zero_()

    model.register_forward_pre_hook(forget, with_kwargs=True)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        (("recurrent_states",), "a model without its recurrent states"),
        (("conv_states",), "a model without its convolution's window"),
        (("conv_states", "recurrent_states"), "a model without its states"),
    ],
)
def test_a_model_that_reads_on_wrongly_is_decoded_plainly(
    kinds: tuple[str, ...], said: str, dtype: torch.dtype
) -> None:
    model = new_model(QWEN, dtype=dtype)
    assert probe(model).mode == "chain"
    support = probe(forgets(model, kinds))
    assert support.mode == "plain"
    assert said in support.reason or "with it several tokens" in support.reason


def test_chains_that_limit_what_steps_do_not_are_found_out() -> None:
    """As with forwards of Mamba 2 that let no time step be too short."""
    model = new_model("bamba")
    mixer = next(m for m in model.modules() if hasattr(m, "time_step_limit"))
    mixer.time_step_limit = (0.5, float("inf"))
    reason = check_chain(model, range(3, 13), TrialLayers(), ())
    assert reason == "a forward over several tokens bounds its time steps, and plain steps do not"


@pytest.mark.parametrize("name", ANY)
def test_after_an_interrupt_while_states_move_on_nobody_goes_on_with_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(name)

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slots, "_move_by_rules", broken)
    with pytest.raises(KeyboardInterrupt):
        chain.step(1, 2)
    chain.backend.release()
    assert not chain.cache.layers


@pytest.mark.parametrize("name", ANY)
def test_an_interrupt_while_states_are_taken_over_leaves_them_to_the_caller(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(name)
    chain.backend.release()
    functions = state_functions(chain.model.modules())
    again = ChainBackend(chain.model, functions=functions)

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slots.States, "show", broken)
    with pytest.raises(KeyboardInterrupt):
        again.admit(chain.prompt)
    again.release()
    assert_same_cache(chain.cache, chain.plain_cache())


def test_a_forward_that_tells_nothing_of_a_state_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one would whose layers are run by code of their own."""
    chain = Chain("bamba")
    monkeypatch.setattr(slots.States, "record", lambda *_: None)
    with pytest.raises(UnsupportedError, match="by code of its own"):
        chain.step(1, 1)


def test_states_that_code_of_its_own_moves_on_get_no_chain() -> None:
    support = probe(tiny_model("zaya"))
    assert (support.mode, support.reason) == (
        "plain",
        "its running states are moved on by code of its own",
    )
