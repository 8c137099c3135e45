"""What stands for functions of transformers works on our states, and leaves all else alone."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec import SelfSpec, UnsupportedError
from selfspec.compat.generation import KV
from selfspec.compat.states import state_functions, states_by_place
from selfspec.forward.layers import StateLayer
from selfspec.forward.states.rules import Ancestry, StateUpdate
from selfspec.forward.states.slots import States
from selfspec.forward.states.swapped_functions import branching
from tests.fakes import new_model, prompt, tiny_model
from tests.lossless.same import GREEDY, NUM_COLUMNS, in_threads, run, run_both
from tests.lossless.test_same_predictions import ALONE

TREE = Ancestry(torch.zeros(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long))


def names_of(model: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for module, name in state_functions(model.modules())}


def read(model: Any) -> tuple[torch.Tensor, Any]:
    kv = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompt(), use_cache=True, **{KV: kv})
        logits = model(input_ids=prompt(1, 3)["input_ids"], use_cache=True, **{KV: kv}).logits
    return logits, kv


@pytest.mark.parametrize("name", ["qwen3-5", "falcon-h1", "kimi-linear", "lfm2"])
def test_stock_forwards_are_as_before_inside(name: str) -> None:
    """Those of another cache in this thread, and those of another thread."""
    model, found = tiny_model(name), []
    logits, kv = read(model)
    stock, functions = names_of(model), state_functions(model.modules())
    with branching(States(), TREE, functions):
        assert names_of(model).items().isdisjoint(stock.items())
        found.append(read(model))
        thread = threading.Thread(target=lambda: found.append(read(model)))
        thread.start()
        thread.join()
        with branching(States(), TREE, functions):
            found.append(read(model))
    assert names_of(model) == stock
    for other, other_kv in found:
        assert torch.equal(other, logits)
        ours = states_by_place(other_kv.layers)
        assert all(torch.equal(ours[at], s) for at, s in states_by_place(kv.layers).items())


def test_what_other_code_puts_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lfm2")
    module, name = state_functions(model.modules())[0]

    def theirs(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    with branching(States(), TREE, state_functions(model.modules())):
        monkeypatch.setattr(module, name, theirs)
    assert getattr(module, name) is theirs


def test_a_forward_that_fails_leaves_the_functions() -> None:
    model = tiny_model("qwen3-5")
    stock = names_of(model)
    with (
        pytest.raises(ZeroDivisionError),
        branching(States(), TREE, state_functions(model.modules())),
    ):
        raise ZeroDivisionError
    assert names_of(model) == stock


class Step:
    """States of two layers, in a forward that halves them and adds 1, and of their convolutions."""

    def __init__(self) -> None:
        types = ["linear_attention", "linear_attention", "full_attention"]
        model = new_model("qwen3-5", layer_types=types, num_hidden_layers=len(types))
        self.states, (_, self.kv) = States(), read(model)
        self.states.layers = {index: StateLayer(self.states, index) for index in range(2)}
        self.states.add(self.kv.layers, 0, 1)
        self.states.show(slice(0, 1))
        held = states_by_place(self.kv.layers).items()
        self.before = {place: state.clone() for place, state in held if state.dim() == 4}
        self.states.begin(TREE)
        for place, state in held:
            if place in self.before:
                heads, keys, values = state.shape[1:]
                parts = ((keys, 1.0), (values, 1.0), (1, -math.log(2)))
                update = StateUpdate(*(torch.full((1, heads, 1, n), each) for n, each in parts))
                self.states.record(place, update)
            else:
                self.states.columns(place, torch.zeros(1, state.shape[1], 1))

    def assert_moved(self) -> None:
        self.states.give_back(self.kv.layers, slice(0, 1))
        after = states_by_place(self.kv.layers)
        assert len(self.before) == 2
        assert all(
            torch.allclose(after[place], state / 2 + 1) for place, state in self.before.items()
        )


def test_states_follow_a_path() -> None:
    step = Step()
    step.states.follow(0, [[0]])
    step.assert_moved()


def test_a_forward_that_tells_nothing_of_a_state_is_an_error() -> None:
    """As one would whose layers are run by code of their own."""
    step = Step()
    branches = step.states.branches
    assert branches is not None
    del branches.updates[next(iter(step.before))]
    with pytest.raises(UnsupportedError, match="by code of its own"):
        step.states.follow(0, [[0]])


@pytest.mark.parametrize("name", ["qwen3-5", "falcon-h1"])
def test_states_are_exact_under_autocast(name: str) -> None:
    """As in plain steps, whose states autocast leaves alone."""
    model = tiny_model(name)
    spec = SelfSpec(**ALONE)
    with torch.autocast("cpu", torch.bfloat16):
        run(model, prompt(), custom_generate=spec, prediction=[5, 6, 7, 8] * 6, **GREEDY)
    assert spec.stats.mode == "tree", spec.stats.disabled_reason


def test_a_draft_of_nan_leaves_the_states() -> None:
    """The walk ends before it, and the next step begins where the text is."""
    model = new_model("qwen3-5")
    inputs, ids = prompt(), run(model, prompt(), **GREEDY).ids
    absent = next(n for n in range(1, 90) if n not in ids)
    with torch.no_grad():
        model.get_input_embeddings().weight[absent] = torch.nan
    wrong = [absent if at % 3 else token for at, token in enumerate(ids[0, NUM_COLUMNS:].tolist())]
    told = {"told": lambda _: {"prediction": wrong}, "drafts": False}
    run_both(model, inputs, SelfSpec(**ALONE), **told, **GREEDY)


def test_threads_share_a_model() -> None:
    """Each has states of its own, and one of them decodes without drafts."""
    model, calls = tiny_model("qwen3-5"), [(prompt(1, 9, seed=seed), seed) for seed in range(3)]
    stock = [run(model, inputs, seed=seed, **GREEDY).ids for inputs, seed in calls]
    found = dict[int, Any]()

    def decode(number: int) -> None:
        inputs, seed = calls[number]
        more: dict[str, Any] = {}
        if number:
            answer = stock[number][0, 9:].tolist()
            more = {"custom_generate": SelfSpec(**ALONE), "prediction": answer[:3] + answer}
        for _ in range(4):
            found[number] = run(model, inputs, seed=seed, **more, **GREEDY).ids

    in_threads(decode, 3, 3)
    assert all(torch.equal(found[number], ids) for number, ids in enumerate(stock))
