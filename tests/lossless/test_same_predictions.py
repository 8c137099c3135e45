"""With `prediction=` the text is stock's, whatever it says; where it is right, steps are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.papers.edgellm import Fallback
from selfspec import SelfSpec
from tests.fakes import VOCAB, attached_model, new_model, prompt, tiny_model, tiny_tokenizer
from tests.lossless.same import (
    FIXED,
    GREEDY,
    NUM_COLUMNS,
    NUM_NEW,
    SAMPLE,
    Call,
    assert_same_ids,
    refused,
    run,
    run_both,
    through,
)
from tests.recorder import use_recorders

ALONE: dict[str, Any] = {**FIXED, "sources": ()}


def answers(stock: torch.Tensor) -> list[list[int]]:
    return [row[NUM_COLUMNS:].tolist() for row in stock]


def edited(answer: list[int]) -> list[int]:
    """A token replaced, one that the text has not, one missing, and nonsense in front."""
    return [5, 9, *answer[:8], 11, *answer[9:17], 8, *answer[17:24], *answer[25:]]


def wrong(answer: list[int]) -> list[int]:
    return [(token + 7) % VOCAB for token in answer] * 3


KINDS = {"right": list, "edited": edited, "wrong": wrong, "short": lambda answer: answer[:5]}


def predicting(change: Callable[[list[int]], list[int]]) -> Callable[[torch.Tensor], Any]:
    """The prediction of each row, made of the row's answer."""
    return lambda ids: {"prediction": [change(answer) for answer in answers(ids)]}


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate", "hub"])
@pytest.mark.parametrize("kind", KINDS)
def test_predictions(kind: str, entrance: str, call: Call, modules_cache: Any) -> None:
    more = {"told": predicting(KINDS[kind]), "entrance": entrance, **call.options}
    both = run_both(attached_model(), call.inputs, SelfSpec(**ALONE), **more)
    least = {"right": 9, "edited": 2.5, "wrong": 1, "short": 1.05}
    assert both.stats.tokens_per_step >= least[kind]


@pytest.mark.parametrize("name", ["measured", "fixed", "threshold"])
def test_every_budget(name: str) -> None:
    budget: Any = Fallback() if name == "threshold" else name
    for change, options in [*((each, GREEDY) for each in KINDS.values()), (edited, SAMPLE)]:
        spec, told = SelfSpec(budget=budget), predicting(change)
        run_both(tiny_model(), prompt(), spec, told=told, drafts=False, **options)


def test_returned_sequences_share_a_prediction() -> None:
    options = SAMPLE | {"num_return_sequences": 3}
    options["told"] = lambda ids: {"prediction": answers(ids)[::3]}
    both = run_both(tiny_model(), prompt(2), SelfSpec(**ALONE), **options)
    assert both.stats.accepted_by_source["prediction"] > 2 * (NUM_NEW - 6)


@pytest.mark.parametrize("shape", [torch.tensor, tuple, lambda ids: torch.tensor([ids, ids])])
def test_one_prediction_serves_all_rows(shape: Any) -> None:
    inputs = {key: value.repeat(2, 1) for key, value in prompt().items()}
    options = GREEDY | {"told": lambda ids: {"prediction": shape(answers(ids)[0])}}
    both = run_both(tiny_model(), inputs, SelfSpec(**ALONE), **options)
    assert both.stats.tokens_per_step > 9


def test_an_empty_prediction_is_none() -> None:
    model, inputs = attached_model(), prompt(2)
    stock = run(model, inputs, **GREEDY)
    for empty in ([], [[], []], ""):
        spec = SelfSpec(**ALONE)
        options = {"assistant": spec, "tokenizer": tiny_tokenizer(), "prediction": empty}
        assert_same_ids(run(model, inputs, **options, **GREEDY).ids, stock.ids)
        assert spec.stats.nodes_per_step == 1


@pytest.mark.parametrize("entrance", ["assistant", "hub"])
def test_text_is_encoded(entrance: str, modules_cache: Any) -> None:
    model, inputs, tokenizer = attached_model(), prompt(2), tiny_tokenizer()
    texts = ["the cat sat on that mat", "a fat rat"]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    seen = []
    for prediction in (texts, ids):
        spec, asked = SelfSpec(**ALONE), {"tokenizer": tokenizer, "prediction": prediction}
        run(model, inputs, **through(entrance, spec), **asked, **GREEDY)
        seen.append((spec.stats.num_nodes, spec.stats.num_steps))
    assert seen[0] == seen[1]
    assert seen[0][0] > seen[0][1]


BAD: dict[str, tuple[Any, str]] = {
    "number": (7, "got 7"),
    "float": ([1.5], "got 1.5"),
    "bool": ([True], "got True"),
    "mixed": ([[1], 2], "got 2"),
    "text and ids": (["a", [1]], "got 'a'"),
    "too large": ([VOCAB], f"got {VOCAB}"),
    "negative": ([-100], "got -100"),
    "rows": ([[1], [2], [3]], "got 3"),
    "text": ("the cat", "tokenizer="),
    "texts": (["the cat", "a rat"], "tokenizer="),
}


@pytest.mark.parametrize("entrance", ["assistant", "custom_generate"])
@pytest.mark.parametrize(("value", "named"), BAD.values(), ids=BAD)
def test_bad_values_are_refused_before_any_work(value: Any, named: str, entrance: str) -> None:
    spec = SelfSpec()
    refused(named, prediction=value, **{entrance: spec})
    assert spec.total_stats.num_calls == 0


# drafts whose keys and values are no numbers

DIFFERENT = ((1, "greedy"), (3, "sample"))
SPOILED = [
    *[(name, "eager", Call(*kind)) for name in ("llama", "bloom") for kind in DIFFERENT],
    ("gemma3", "eager", Call(3, "greedy")),
    ("mamba2", "eager", Call(1, "greedy")),
    ("gemma3", "graph", Call(3, "sample")),
    ("llama", "graph", Call(1, "greedy")),
    ("gemma3", "float16", Call(3, "greedy")),
]


@pytest.mark.parametrize(("name", "forward", "call"), SPOILED)
def test_drafts_that_are_no_numbers(
    name: str, forward: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask adds to a NaN and hides nothing, and a weight of 0 times a NaN is one, too."""
    if forward == "graph":
        use_recorders(monkeypatch)
    dtype, values = torch.float32, (torch.nan, torch.inf)
    if forward == "float16":  # It scales its embeddings.
        dtype, values = torch.float16, (6e4, -6e4)
    model, inputs = new_model(name, dtype=dtype), call.inputs
    stock = run(model, inputs, **call.options).ids
    unnamed = sorted(set(range(VOCAB)) - set(stock.flatten().tolist()))[-2:]
    with torch.no_grad():
        for token, value in zip(unnamed, values, strict=True):
            model.get_input_embeddings().weight[token] = value
    seen = [answer[:14] for answer in answers(stock)]  # It goes on as it should.
    bad = [[*ids[:2], unnamed[0], *ids[3:9], unnamed[1], *ids[10:]] for ids in seen]
    for sources in ((), SelfSpec().config.sources):
        spec = SelfSpec(**FIXED | {"sources": sources})
        both = run_both(
            model, inputs, spec, told=lambda _: {"prediction": bad}, drafts=False, **call.options
        )
        assert both.stats.num_nodes > both.stats.num_steps
        # A step of nothing but NaN brings no token, and the next one drafts nothing and brings one.
        # A text that repeats itself has the bad tokens in the trees of most other steps.
        assert both.stats.tokens_per_step > 0.5
    assert_same_ids(both.stock.ids, stock)
