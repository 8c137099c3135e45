"""The logits processors of one prompt: one for its schema, by llguidance, and one for penalties.

llguidance counts the work of compiling a schema and stops at a limit, so that no schema takes long.
It refuses keywords that it does not know. An answer is JSON as `json.dumps` writes it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selfspec.errors import UnsupportedError, one_line
from selfspec.forward.model import vocab_size
from selfspec.row_rules import end_ids

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_MOST_CHARACTERS = 1 << 17  # Looking through a longer schema takes too long.
_MOST_KEPT = 64  # Compiled schemas; the one that was used longest ago goes first.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark(str):
    """The form that a text must have: a grammar in the syntax of Lark."""


def guide_of(schema: Any) -> Lark:
    """The guide of a schema: a dictionary, its JSON, or a model of pydantic."""
    if isinstance(schema, Lark):
        return schema
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(value, dict):
            return Lark(f"start: {json_rule(value)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(f"a schema must be JSON ({one_line(error):.120})") from error
    raise UnsupportedError(f"a schema must be an object (got {schema!r:.80})")


def json_rule(schema: dict[str, Any]) -> str:
    """JSON that keeps to a schema, as a rule of Lark."""
    return f"%json {json.dumps({'x-guidance': _SPACING, **schema})}"


class Guides:
    """Compiles guides for one model, and keeps those that were used last."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._compiled = lru_cache(_MOST_KEPT)(self._compile)
        self._words: LLTokenizer | None = None

    def applied(self, *, schema: Any = None, **arguments: Any) -> dict[str, Any]:
        """The arguments of one call, with processors in place of its schema and penalties."""
        processors = list(arguments.pop("logits_processor", None) or ())
        presence = arguments.pop("presence_penalty", 0.0)
        frequency = arguments.pop("frequency_penalty", 0.0)
        if presence or frequency:
            processors.append(CountPenalties(presence, frequency))
        if schema is not None:
            processors.append(self.processor(guide_of(schema)))
        return {**arguments, "logits_processor": processors} if processors else arguments

    def processor(self, guide: Lark) -> GuideProcessor:
        if len(guide) > _MOST_CHARACTERS:
            rule = f"a schema must have at most {_MOST_CHARACTERS} characters"
            raise UnsupportedError(f"{rule} (got {len(guide)})")
        return GuideProcessor(self._compiled(guide).deep_copy(), self._words)

    def _compile(self, guide: Lark) -> LLMatcher:
        if find_spec("llguidance") is None:
            raise UnsupportedError("a schema needs the package llguidance: pip install llguidance")
        import llguidance
        import llguidance.hf

        if self._words is None:
            ends = end_ids(self._model.generation_config) or [self._tokenizer.eos_token_id]
            self._words = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=vocab_size(self._model), eos_token=ends
            )
        try:
            grammar = llguidance.LLMatcher.grammar_from_lark(guide)
            matcher = llguidance.LLMatcher(self._words, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()
            why = _why(matcher)
        except ValueError as error:
            why = one_line(error)[:200]
        if why:
            raise UnsupportedError(f"the schema can't be used: {why}")
        return matcher


def _why(matcher: LLMatcher) -> str:
    """The error of a matcher of llguidance, without the dump of its state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:200]


class GuideProcessor:
    """Rules out the tokens that the guide of one text forbids next. It must see every token.

    Raises `UnsupportedError` where no token is allowed, or where the guide takes too much work.
    """

    is_row_wise = True

    def __init__(self, matcher: LLMatcher, words: LLTokenizer | None) -> None:
        self._matcher = matcher
        self._words = words  # `compat.grammars` reads it, to draft what the guide allows.
        self._length = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        fresh = input_ids[0, self._length :].tolist() if self._length else []
        self._length = input_ids.shape[1]
        if fresh and not self._matcher.is_stopped():
            self._matcher.consume_tokens(fresh)
        if not self._matcher.is_error():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            is_allowed = np.zeros(scores.shape[1], bool)
            allowed = np.unpackbits(bits, bitorder="little")[: len(is_allowed)] == 1
            is_allowed[: len(allowed)] = allowed
            scores = scores.masked_fill(~torch.from_numpy(is_allowed).to(scores.device), -torch.inf)
        # Others, such as that of `bad_words_ids`, may have ruled out what the guide allows.
        if self._matcher.is_error() or scores.max() == -torch.inf:
            why = _why(self._matcher) or "no token is allowed"
            raise UnsupportedError(f"the text can't keep to its schema any further: {why}")
        return scores


class CountPenalties:
    """OpenAI's two penalties for one text.

    Lowers the scores of the tokens of the answer: once, and for every time that they are there.

    The prompt counts for nothing. The first call is that of the prompt's last logits, so that it
    shows where the answer begins. Each call counts anew, since drafts are tried and dropped.
    """

    is_row_wise = True

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency
        self._num_prompt: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._num_prompt is None:
            self._num_prompt = input_ids.shape[1]
        answer = input_ids[:, self._num_prompt :]
        once = torch.ones_like(answer, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, once)
        return scores - self._frequency * counts - self._presence * (counts > 0)
