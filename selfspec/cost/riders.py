"""What a branch query brings, counted, so that branches compete with the tree for width."""

from __future__ import annotations

from selfspec.cost.means import MeanRatio

__all__ = ["RiderWorth"]

# Assumed before anything was counted: 12 queries brought about 0.15 tokens a step on chat text.
_PRIOR_WORTH = 0.0125
_PRIOR_QUERIES = 256.0
# Each later query leaves a query this share of its weight.
_FADE = 0.999
# After so many steps without branches one goes with them, since what they bring may have changed.
_TRY_EVERY = 64


class RiderWorth:
    """Tokens for each query of a branch: a fading mean that starts from a prior."""

    def __init__(self) -> None:
        self._worth = MeanRatio(_PRIOR_WORTH, weight=_PRIOR_QUERIES, fade=_FADE)
        self._num_left_out = 0

    def pay(self, num_queries: int, tokens_instead: float) -> bool:
        """Do so many queries bring more than their time brings without them? Asked once a step."""
        if self._worth.value * num_queries > tokens_instead or self._num_left_out >= _TRY_EVERY:
            self._num_left_out = 0
            return True
        self._num_left_out += 1
        return False

    def observe(self, num_queries: int, num_tokens: int) -> None:
        """Takes in a row's queries of a step, and its tokens that branches had foreseen."""
        self._worth.observe(num_tokens, num_queries)
