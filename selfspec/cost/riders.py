"""What a branch query brings, counted, so that branches compete with the tree for width."""

from __future__ import annotations

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
        self._queries = _PRIOR_QUERIES
        self._tokens = _PRIOR_WORTH * _PRIOR_QUERIES
        self._num_left_out = 0

    @property
    def worth(self) -> float:
        """Tokens that one query brings."""
        return self._tokens / self._queries

    def pay(self, num_queries: int, tokens_instead: float) -> bool:
        """Do so many queries bring more than their time brings without them? Asked once a step."""
        if self.worth * num_queries > tokens_instead or self._num_left_out >= _TRY_EVERY:
            self._num_left_out = 0
            return True
        self._num_left_out += 1
        return False

    def observe(self, num_queries: int, num_tokens: int) -> None:
        """Takes in a row's queries of a step, and its tokens that branches had foreseen."""
        kept = _FADE**num_queries
        self._queries = self._queries * kept + num_queries
        self._tokens = self._tokens * kept + num_tokens
