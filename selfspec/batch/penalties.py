"""OpenAI's two penalties, as a logits processor for one text."""

from __future__ import annotations

import torch


class CountPenalties:
    """Lowers the scores of the tokens of the answer: once, and for every time that they are there.

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
