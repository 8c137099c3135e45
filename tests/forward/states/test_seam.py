"""What stands for functions of transformers works on our states, and leaves all else alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from selfspec import SelfSpec
from selfspec.compat.branching import state_functions
from selfspec.compat.generation import KV
from selfspec.compat.states import states_by_place
from selfspec.forward.states import slots
from selfspec.forward.states.rules import Ancestry, Told
from selfspec.forward.states.seam import branching
from selfspec.forward.states.slots import States
from tests.fakes import new_model, prompt, tiny_model
from tests.lossless.same import GREEDY, NUM_COLUMNS, run, run_both
from tests.lossless.test_same_predictions import ALONE

TREE = Ancestry(torch.zeros(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long))


def names_of(model: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for module, name in state_functions(model)}


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
    stock, functions = names_of(model), state_functions(model)
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
    module, name = state_functions(model)[0]

    def theirs(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    with branching(States(), TREE, state_functions(model)):
        monkeypatch.setattr(module, name, theirs)
    assert getattr(module, name) is theirs


def test_a_forward_that_fails_leaves_the_functions() -> None:
    model = tiny_model("qwen3-5")
    stock = names_of(model)
    with pytest.raises(ZeroDivisionError), branching(States(), TREE, state_functions(model)):
        raise ZeroDivisionError
    assert names_of(model) == stock


def test_an_interrupt_while_states_move_on_moves_none_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes right after a state has moved; the next call moves the others."""
    types = ["linear_attention", "linear_attention", "full_attention"]
    model = new_model("qwen3-5", layer_types=types, num_hidden_layers=len(types))
    move, errors = slots.move, [KeyboardInterrupt]

    def stumbling(*args: Any) -> None:
        move(*args)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(slots, "move", stumbling)
    states, (_, kv) = States(), read(model)
    states.layers = {index: slots.StateLayer(states, index) for index in range(2)}
    states.add(kv.layers, 0, 1)
    states.show(slice(0, 1))
    before = {
        place: held.clone() for place, held in states_by_place(kv.layers).items() if held.dim() == 4
    }
    assert len(before) == 2
    states.begin(TREE)
    for place, held in before.items():
        heads, keys, values = held.shape[1:]
        parts = ((keys, 1.0), (values, 1.0), (1, 0.0))
        states.tell(place, Told(*(torch.full((1, heads, 1, n), each) for n, each in parts)))
    states.follow(0, [[0]])
    with pytest.raises(KeyboardInterrupt):
        states.settle()
    states.settle()
    states.settle()
    states.give_back(kv.layers, slice(0, 1))
    after = states_by_place(kv.layers)
    assert all(torch.equal(after[place], held + 1) for place, held in before.items())


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
