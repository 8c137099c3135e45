"""A node is where the model's own plain step would be, whatever that makes of positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from selfspec import SelfSpec
from selfspec.compat.generation import KV
from tests.batch.test_generate_many import assert_as_alone, prompts
from tests.fakes import WildSource, new_model, of_library, prompt, tiny_model
from tests.lossless.same import FIXED, SAMPLE, Call, attached, run_both
from tests.zoo import MULTIMODAL

COUNTING = ("exaone4-5", "hyperclovax-vision-v2")  # They give their plain steps no positions.
PADDED = "its plain steps are given no positions, and some columns are padding"


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "shifted": lambda positions: positions + 1,
    "dropped": lambda _positions: None,
    "floats": lambda positions: positions.float(),
    "halves": lambda positions: positions + 0.5,
    "doubled": lambda positions: 2 * positions,
}


def with_odd_steps(model: Any, move: str) -> Any:
    """The model, whose own steps from now on get positions that were moved."""
    stock = model.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = stock(*args, **kwargs)
        if (positions := inputs.get("position_ids")) is not None:
            inputs["position_ids"] = MOVES[move](positions)
        return inputs

    model.prepare_inputs_for_generation = of_library(prepare)
    return model


def some_rows(model: Any, call: Call, *, chains: str | None = None) -> None:
    """Stock's text, by trees unless a reason for chains is named."""
    both = run_both(model, call.inputs, drafts=False, **call.options)
    assert (both.stats.disabled_reason is None) == (chains is None)
    assert both.stats.disabled_reason in (None, f"{chains}; drafting chains instead of trees")
    assert chains or both.stats.num_nodes > both.stats.num_steps


def many_prompts(model: Any) -> None:
    spec = SelfSpec(extra_sources=[WildSource()], **FIXED)
    with attached(model):
        assert_as_alone(model, prompts((17, 5, 30)), spec, max_new_tokens=12, **SAMPLE)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_of_multimodal_models(name: str, call: Call) -> None:
    is_padded = call.num_rows > 1 and name in COUNTING
    some_rows(tiny_model(name), call, chains=PADDED if is_padded else None)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_many_texts_of_multimodal_models(name: str) -> None:
    many_prompts(tiny_model(name))


CHAINS = {
    "halves": "the positions of its plain steps are no whole numbers",
    "doubled": "in a trial its answers were those of a model that sees other guesses",
}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("move", MOVES)
def test_models_that_move_drop_or_convert_positions(name: str, move: str, call: Call) -> None:
    if name == "gpt2" and move in ("floats", "halves"):
        pytest.skip("it looks positions up in a table, and stock fails too")
    model = with_odd_steps(new_model(name), move)
    is_padded = call.num_rows > 1 and move == "dropped"
    some_rows(model, call, chains=PADDED if is_padded else CHAINS.get(move))


@pytest.mark.parametrize("move", MOVES)
def test_many_prompts_with_moved_positions(move: str) -> None:
    many_prompts(with_odd_steps(new_model(), move))


class CountsFromThree(GPT2LMHeadModel):
    """Counts positions by itself from 3, as Kosmos-2.5 does, and gives its plain steps none."""

    __module__ = GPT2LMHeadModel.__module__

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None:
            kv = more.get(KV)
            start = 3 + (0 if kv is None else kv.get_seq_length())
            position_ids = torch.arange(start, start + input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=position_ids, **more)


# As a library's own: a user's class would not be tried.
CountsFromThree.forward = wraps(GPT2LMHeadModel.forward)(of_library(CountsFromThree.forward))


def test_a_model_that_counts_positions_by_itself_gets_no_trees(call: Call) -> None:
    model = with_odd_steps(new_model("gpt2"), "dropped")
    model.__class__ = CountsFromThree
    both = run_both(model, call.inputs, drafts=False, **call.options)
    assert both.stats.disabled_reason.startswith("several tokens in one forward give")


@pytest.mark.parametrize("name", ["llama4", "mistral", "gpt2", "gemma3", "bloom", "lfm2"])
def test_a_row_that_is_all_padding(name: str, call: Call) -> None:
    """The chunks of Llama 4 begin at a row's first token: behind the prompt, if it has none."""
    inputs = prompt(max(call.num_rows, 2))
    inputs["attention_mask"][1] = 0
    run_both(tiny_model(name), inputs, drafts=False, **call.options)
