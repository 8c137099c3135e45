"""Processors of other libraries that hold a grammar, for a tokenizer of our own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "smaller", "large"]},
        "ready": {"type": "boolean"},
        "ids": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["size", "ready", "ids"],
    "additionalProperties": False,
}
TEXT = '{"size": "small", "ready": true, "ids": [1]}'
KINDS = ("xgrammar", "llguidance")


class Guided(LogitsProcessor):
    """A processor as users of llguidance write it, which must be called once for each token."""

    def __init__(self) -> None:
        import llguidance.hf

        self.tokenizer = llguidance.hf.from_tokenizer(TOKENIZER)
        self.grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
        self.matchers: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import llguidance

        for matcher, row in zip(self.matchers, input_ids.tolist(), strict=False):
            assert matcher.is_stopped() or matcher.consume_token(row[-1])
        if not self.matchers:
            self.matchers = [llguidance.LLMatcher(self.tokenizer, self.grammar) for _ in input_ids]
        masks = [np.frombuffer(each.compute_bitmask(), np.uint8) for each in self.matchers]
        bits = np.unpackbits(np.stack(masks), axis=1, bitorder="little")[:, : scores.shape[1]]
        return scores.masked_fill(torch.from_numpy(bits == 0), -float("inf"))


def new_processor(kind: str) -> Any:
    """A fresh processor that leaves texts of the schema; skips the test without its library."""
    library = pytest.importorskip(kind, exc_type=ImportError)
    if kind == "llguidance":
        return Guided()
    from xgrammar.contrib.hf import LogitsProcessor as Processor

    info = library.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=len(TOKENIZER))
    return Processor(library.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA)))


def processors(kind: str) -> LogitsProcessorList:
    """The same in a list."""
    return LogitsProcessorList([new_processor(kind)])
