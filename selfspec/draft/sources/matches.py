"""Where a text reads as the end of another one does, or as its own end does: matches.

Serves the text of a request and a prediction alike; knows nothing of what a match is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The position of the next token in the text, and how many tokens before it agree.
Match = tuple[int, int]


class IndexedText:
    """A text that may grow, and the positions right after each of its tokens."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids: list[int] = []
        self._after: dict[int, list[int]] = {}
        for token in token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        self.token_ids.append(token)
        self._after.setdefault(token, []).append(len(self.token_ids))

    def after(self, token: int) -> Sequence[int]:
        """The positions right after a token, in order."""
        return self._after.get(token, ())

    def next_tokens(self, matches: Iterable[Match]) -> list[tuple[int, int]]:
        """The token after each match and the match's length, where the text goes on."""
        ids, end = self.token_ids, len(self.token_ids)
        return [(ids[position], length) for position, length in matches if position < end]

    def longer(self, matches: Iterable[Match], token: int) -> list[Match]:
        """The matches that one more token continues."""
        ids, end = self.token_ids, len(self.token_ids)
        return [(p + 1, n + 1) for p, n in matches if p < end and ids[p] == token]
