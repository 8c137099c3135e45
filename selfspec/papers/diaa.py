"""DIAA: two look-up tables, and a new tree in every step.

"DIAA: A Decoding-Efficient Inference Acceleration Approach for On-Device Large Language Models"
(AAAI 2026). No second model: the t-LUT holds for a token the K next tokens that the model found
likeliest when it last read it, and the p-LUT their probabilities. All nodes of a verified tree fill
them, rejected ones too. A tree grows from them best-first. Its utility is the sum over its paths of
the product of their tokens' probabilities (equation 1), under a budget B of drafted tokens, and a
path π is scored (equation 2) by

    s(π) = Π p_draft(x_i | x_<i) · δ^(|π| - 1) · Π α^(rank_i - 1).

Paths below a threshold τ are pruned, but the first level is always there. A tree may keep its
shape for N steps. While the CPU grows the next tree, a GPU updates the tables and the KV cache on
streams of its own. Here tables are in the CPU's memory and learn between two forwards: a second
stream made steps on an H200 no shorter, and learning beside the forward cost tokens.

``SelfSpec.as_in("diaa", cache=...)``: a cache is the paper's warm-up, whose tables were filled from
ShareGPT. ``selfspec cache build`` fills them from conversations of one's own.

What the text leaves open, and how it is read here:

- Which of a node's K tokens are merged into a row (figure 6): all K, so that they replace it.
  Where the model's own choice alone replaced an entry, tables were further from the paper.
- Whether α is taken once a level or once a path: once a level.
- The cost of a tree counts a node once for every path through it there. Here it counts once, since
  that is what a forward takes.
- B: 64. δ, α and τ are those of figure 7, N is 1.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from selfspec.draft.calibration import FixedPrior
from selfspec.draft.shape import Shape
from selfspec.draft.sources import LutSource
from selfspec.draft.tree import TreeGrower, TreePlace
from selfspec.errors import ConfigError
from selfspec.records import Candidate, Evidence

FINE = 4096  # A probability is evidence as a whole number of these parts.
_MOST_TOKENS = 1 << 18  # More than any vocabulary has.


class DynamicTree(Shape):
    """A shape: equation 2, the threshold, and the update interval."""

    def __init__(
        self, *, delta: float = 0.8, alpha: float = 0.7, tau: float = 5e-3, interval: int = 1
    ) -> None:
        is_number = all(isinstance(number, int | float) for number in (delta, alpha, tau))
        is_whole = isinstance(interval, int) and interval >= 1
        if not (is_number and is_whole and 0 < delta <= 1 and 0 < alpha <= 1 and 0 <= tau < 1):
            raise ConfigError(
                "delta and alpha must be in (0, 1], tau in [0, 1) and interval a whole number >= 1 "
                f"(got {delta!r}, {alpha!r}, {tau!r} and {interval!r})"
            )
        self.delta, self.alpha, self.tau, self.interval = delta, alpha, tau, interval
        self._places: Sequence[TreePlace] = ()
        self._num_uses = 0

    def for_row(self, prompt_ids: Sequence[int], *, learns: bool) -> DynamicTree:
        """A copy, which keeps the last shape of one row."""
        return copy.copy(self)

    def grow(self, grower: TreeGrower) -> None:
        """A new shape, or for N - 1 steps the last one with new tokens."""
        if self._places and self._num_uses < self.interval:
            self._num_uses += 1
            grower.fill(self._places)
        else:
            self._places, self._num_uses = grower.best_first(score=self.score), 1

    def score(self, chance: float, depth: int, rank: int) -> float | None:
        """Equation 2, one level after the other."""
        score: float = chance * self.alpha**rank * (1 if depth == 1 else self.delta)
        return score if depth == 1 or score >= self.tau else None


class Tables(LutSource):
    """A source: t-LUT and p-LUT, with probabilities as they were recorded.

    They have the name of our own first table, so that a cache fills either.
    """

    def __init__(self, k: int = 8) -> None:
        super().__init__(_MOST_TOKENS, k)

    def next_tokens(self, last: tuple[int, ...]) -> list[Candidate]:
        """The row of the last token."""
        if not 0 <= last[-1] < _MOST_TOKENS:
            return []
        ids, chances = self.token_ids[last[-1]].tolist(), self.probabilities[last[-1]].tolist()
        return [
            (token, Evidence(self.name, rank=rank, probability_bin=round(chance * FINE)))
            for rank, (token, chance) in enumerate(zip(ids, chances, strict=True), start=1)
            if token >= 0
        ]


def recorded(evidence: Evidence) -> float:
    """The probability that the p-LUT holds."""
    return evidence.probability_bin / FINE


def method(
    *,
    top_k: int = 8,
    delta: float = 0.8,
    alpha: float = 0.7,
    tau: float = 5e-3,
    interval: int = 1,
    **options: Any,
) -> dict[str, Any]:
    return {
        "sources": (),
        "extra_sources": [Tables(top_k)],
        "shape": DynamicTree(delta=delta, alpha=alpha, tau=tau, interval=interval),
        "calibration": FixedPrior(recorded),
        "budget": "fixed",
        "top_k": top_k,
        **options,
    }


# The paper: 1.78 to 2.22 times plain decoding on a Jetson, 512 tokens. Here, warmed on 46 other
# answers, 256 tokens: 2.19 tokens a step with 23 nodes; 1.47 with 11 in answers of 40, cold.
#     python -m eval run --methods diaa --cache own --max-new-tokens 256 --max-nodes 64 …
