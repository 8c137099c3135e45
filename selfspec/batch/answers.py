"""`Answer`: what came of one of many prompts, and what gets its tokens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from selfspec.batch.token_scores import TokenScore, TokenScores
from selfspec.errors import without_frames
from selfspec.prompt import Prompt
from selfspec.row_rules import end_ids
from selfspec.session import ReaderGone
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Gets the next tokens of an answer. Returns False if nobody reads on.
OnTokens = Callable[[Sequence[int]], object]


@dataclass(frozen=True)
class Answer:
    """What the model wrote after one prompt.

    Attributes:
        index: Which prompt it is, counted from 0 in the order in which they were given.
        text: The new text, without special tokens; after an error, as far as it came.
        ids: The new tokens, the end-of-text token among them.
        finish_reason: ``"stop"`` if the model or a stop string ended the text, ``"length"`` if it
            was cut off at the most tokens, ``"error"`` if an error ended it.
        num_prompt_tokens: How many tokens the prompt has.
        stats: What was counted for this prompt. Rows that share a step share its time equally.
        error: The exception that has ended the text, or why the prompt was refused; its traceback
            is the text of its cause. None: all went well.
        logprobs: The `TokenScore` of every new token, if the call wanted them.
        prompt_logprobs: The same of the prompt.
    """

    index: int
    text: str
    ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    stats: GenerationStats
    error: Exception | None = None
    logprobs: list[TokenScore] | None = None
    prompt_logprobs: list[TokenScore] | None = None

    @classmethod
    def to(cls, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None = None) -> Answer:
        """The answer to a prompt whose text is complete, or was ended by an error.

        Without a tokenizer it has no text, for those who have decoded it while it came.
        """
        ids, text = prompt.new_ids, ""
        error = prompt.result.error if isinstance(prompt.result.error, Exception) else None
        try:
            if tokenizer is not None:
                text = str(tokenizer.decode(ids, skip_special_tokens=True))
        except Exception as fault:
            error = error or without_frames(fault)
        is_ended = bool(ids) and ids[-1] in end_ids(prompt.generation_config)
        is_full = prompt.num_tokens + len(ids) >= prompt.max_length
        reason = "length" if is_full and not is_ended else "stop"
        if error is not None:
            reason = "error"
        scores = prompt.scores.tokens, prompt.scores.prompt
        return cls(prompt.index, text, ids, reason, prompt.num_tokens, prompt.stats, error, *scores)

    @classmethod
    def refused(cls, index: int, error: Exception) -> Answer:
        """The answer to a prompt that could not be prepared."""
        return cls(index, "", [], "error", 0, GenerationStats(), without_frames(error))


class TokenStreamer:
    """A streamer that hands on the tokens of one text, and ends it if nobody reads on."""

    def __init__(self, on_tokens: OnTokens | None, scores: TokenScores) -> None:
        self._on_tokens = on_tokens
        self._scores = scores

    def put(self, value: torch.Tensor) -> None:
        ids = value.tolist()
        self._scores.on_tokens(ids)
        if self._on_tokens is not None and self._on_tokens(ids) is False:
            raise ReaderGone

    def end(self) -> None:
        """Does nothing: the answer itself is the end."""
