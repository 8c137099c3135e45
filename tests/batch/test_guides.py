"""Answers of many prompts keep to their schemas, and are what `generate()` writes with these."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from selfspec import SelfSpec, UnsupportedError, generate_many
from tests.sessions import alone
from tests.tiny import make_model, make_tokenizer

pytest.importorskip("llguidance", reason="needs the extra: pip install '.[grammar]'")

from selfspec.batch.guides import Guides, guide_of

TOKENIZER = make_tokenizer()
PROMPTS = [[5, 40], [6, 41, 42], [7, 43]]


class Parcel(BaseModel, extra="forbid"):
    ready: bool
    sizes: list[bool]


def texts(schema: Any, num_prompts: int = 3, **options: Any) -> list[str]:
    model, spec = make_model(len(TOKENIZER)), SelfSpec(budget="fixed", max_nodes=8)
    answers = list(
        generate_many(
            model,
            TOKENIZER,
            PROMPTS[:num_prompts],
            assistant=spec,
            schema=schema,
            seed=3,
            max_new_tokens=60,
            **options,
        )
    )
    assert spec.total_stats.accepted_by_source["grammar"] > 0
    return [TOKENIZER.decode(each.ids) for each in sorted(answers, key=lambda each: each.index)]


def text_alone(index: int, schema: Any, **options: Any) -> str:
    """What stock writes with the processor of a schema."""
    model = make_model(len(TOKENIZER))
    options["logits_processor"] = [Guides(TOKENIZER, model).processor(guide_of(schema))]
    return TOKENIZER.decode(alone(model, PROMPTS[index], 3 + index, max_new_tokens=60, **options))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 1.5}])
def test_texts_are_those_of_stock_with_the_same_schema(options: dict[str, Any]) -> None:
    schemas = [Parcel, {"enum": ["brown fox", "lazy dog"]}, json.dumps({"type": "boolean"})]
    for index, each in enumerate(schemas):
        assert texts(each, **options)[index] == text_alone(index, each, **options)
    Parcel.model_validate_json(text_alone(0, Parcel, **options).removesuffix("<|eos|>"))


def test_a_schema_is_for_all() -> None:
    assert set(texts({"type": "boolean"})) <= {"true<|eos|>", "false<|eos|>"}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"type": "text"}}}, "Invalid type: text"),
        ({"type": "string", "pattern": "(a"}, "can't be used"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ("[", "must be JSON"),
        (7, "must be an object"),
    ],
)
def test_what_is_wrong_in_a_schema_is_told(schema: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        texts(schema)
