"""A grammar's text is stock's, whatever is drafted from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selfspec
from selfspec import SelfSpec
from tests.grammars import KINDS, TOKENIZER, processors
from tests.lossless.same import slow
from tests.tiny import make_model

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5},
}


def texts(kind: str, num_rows: int, spec: SelfSpec | None, **options: Any) -> list[list[int]]:
    model = make_model(len(TOKENIZER))
    prompts = torch.tensor([[5 + row, 40, 41, 42] for row in range(num_rows)])
    options |= {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 60}
    torch.manual_seed(3)
    if spec is not None:
        selfspec.attach(model)
        options["assistant"] = spec
    ids: list[list[int]] = model.generate(
        prompts, logits_processor=processors(kind), **options
    ).tolist()
    return [[*ids, torch.randint(1000, ()).item()]]


@pytest.mark.parametrize(
    ("num_rows", "way"),
    [(1, "greedy"), (4, "sampled"), slow(1, "sampled"), slow(4, "greedy")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_stock(kind: str, num_rows: int, way: str) -> None:
    spec = SelfSpec(budget="fixed", max_nodes=12)
    assert texts(kind, num_rows, spec, **WAYS[way]) == texts(kind, num_rows, None, **WAYS[way])
    assert spec.stats.accepted_by_source["grammar"] > 0
