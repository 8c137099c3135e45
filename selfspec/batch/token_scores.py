"""How likely the model finds the tokens of a text: the log probabilities that clients ask for.

They are the model's own: of its logits before any processor, as vLLM's are by default. They are
read along the verified path alone, so that no draft is in them, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from selfspec.verify.logits import largest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
