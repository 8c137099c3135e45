"""EdgeLLM's self-adaptive threshold: drafts reach further while they are right."""

from __future__ import annotations

__all__ = ["AdaptiveThreshold"]

_LEAST, _MOST = 1e-6, 0.99


class AdaptiveThreshold:
    """The threshold α, under which no node is drafted.

    After a path that was accepted whole α ← α / 2; otherwise
    α ← α / Tc^((N_all - N_correct) / N_all), with Tc the path's cumulative confidence, the product
    of its probabilities. Stays in [1e-6, 0.99].
    """

    def __init__(self, start: float = 0.01) -> None:
        self.value = _between_bounds(start)

    def observe(self, num_drafted: int, num_correct: int, confidence: float) -> None:
        """Takes in a verified path: its length, how much of it was right, and its score."""
        if num_drafted < 1:
            return
        wrong = (num_drafted - num_correct) / num_drafted
        factor = max(confidence, _LEAST) ** -wrong if wrong else 0.5
        self.value = _between_bounds(self.value * factor)


def _between_bounds(threshold: float) -> float:
    return min(max(threshold, _LEAST), _MOST)
