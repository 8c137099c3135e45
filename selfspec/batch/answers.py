"""`Answer`: what came of one of many prompts, what gets its tokens meanwhile, and their scores.

Log probabilities are the model's own: of its logits before any processor, as vLLM's are by default.
They are read along the verified path alone, so that no draft is in them, and nothing is computed
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from selfspec.errors import without_frames
from selfspec.prompt import Prompt
from selfspec.row_rules import end_ids
from selfspec.session import ReaderGone
from selfspec.stats import GenerationStats
from selfspec.verify.logits import largest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Gets the next tokens of an answer. Returns False if nobody reads on.
OnTokens = Callable[[Sequence[int]], object]


_LEAST = -9999.0  # OpenAI's number for what is impossible, which JSON can't say otherwise.


class TokenScore(NamedTuple):
    """A token, its log probability, and the likeliest tokens in its place, likeliest first.

    In front of the first token of a prompt is nothing, so it has no log probability.
    """

    token: int
    text: str  # The token decoded by itself; with U+FFFD for a part of a character.
    logprob: float | None
    top: Sequence[TokenScore] = ()


class TokenScores:
    """Writes down the scores of one text; `num_top` and `num_of_prompt` say how many, if any.

    It is the first of the processors of a call, and changes nothing. So it sees the logits of each
    new token, however the call is decoded. Of a prompt, its reader tells.
    """

    is_row_wise = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_top: int | None = None,
        num_of_prompt: int | None = None,
    ) -> None:
        # None where the call does not want them.
        self.tokens: list[TokenScore] | None = None if num_top is None else []
        self.prompt: list[TokenScore] | None = None if num_of_prompt is None else []
        self.prompt_ids: list[int] = []  # To be set before the prompt is read.
        self._tokenizer = tokenizer
        # Texts by id: in a long prompt, the same tokens are likely again and again.
        self._texts: dict[int, str] = {}
        self._num_top, self._num_of_prompt = num_top or 0, num_of_prompt or 0
        self._logprobs = torch.empty(0, dtype=torch.float32, device="cpu")  # (1, V)

    @property
    def is_wanted(self) -> bool:
        return self.tokens is not None or self.prompt is not None

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            self._logprobs = scores.log_softmax(-1)
        return scores

    def on_tokens(self, ids: Sequence[int]) -> None:
        if self.tokens is not None:
            self.tokens += self._scored(self._logprobs, ids, self._num_top)

    def on_logits(self, start: int, logits: torch.Tensor) -> None:
        """Gets the logits (1, L, V) of a part of the prompt, by the number of its first token."""
        before = [self._score(self.prompt_ids[0], None)] if not start else self.prompt or []
        ids = self.prompt_ids[start + 1 : start + 1 + logits.shape[1]]
        logprobs = logits[0, : len(ids)].log_softmax(-1, dtype=torch.float32)
        self.prompt = before + self._scored(logprobs, ids, self._num_of_prompt)

    def _scored(self, logprobs: torch.Tensor, ids: Sequence[int], num_top: int) -> list[TokenScore]:
        """The scores of tokens, by their rows of (L, V)."""
        if not ids:
            return []
        chosen = logprobs.gather(1, torch.tensor(ids, device=logprobs.device)[:, None])[:, 0]
        values, tops = largest(logprobs, min(num_top, logprobs.shape[1]))
        rows = zip(ids, chosen.tolist(), tops.tolist(), values.tolist(), strict=True)
        return [
            self._score(token, logprob, list(map(self._score, top, of_top)))
            for token, logprob, top, of_top in rows
        ]

    def _score(
        self, token: int, logprob: float | None, top: Sequence[TokenScore] = ()
    ) -> TokenScore:
        if token not in self._texts:
            self._texts[token] = self._text(token)
        if logprob is not None and not logprob > _LEAST:  # True for NaN, too.
            logprob = _LEAST
        return TokenScore(token, self._texts[token], logprob, top)

    def _text(self, token: int) -> str:
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        word = str(self._tokenizer.convert_ids_to_tokens(token))
        # Some decoders leave out the space that a word begins with.
        return f" {text}" if word.startswith("\u2581") and not text.startswith(" ") else text


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
