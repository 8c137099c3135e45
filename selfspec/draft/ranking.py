"""The candidates of a node, likeliest first: by their evidence, and by noise where it is known."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable

from selfspec.draft.calibration import UNKNOWN, NoiseGrid
from selfspec.records import COMMON, DRAFT_MODEL, Draws, Evidence, NoiseOf, Siblings

Probability = Callable[[tuple[Evidence, ...]], float]
# A candidate: its chance, its token, its evidence, and the cell of the grid that says what its
# noise made of the chance.
_Candidate = tuple[float, int, tuple[Evidence, ...], int]

# These sources look at the noise themselves.
_KNOWING = {COMMON, DRAFT_MODEL}


class Ranking:
    """Ranks the candidates of one row's nodes.

    Only ids below `num_ids` are left in: a prompt may have others in the places of images, which
    the model could not read as drafts. The token `banned` is left out, and nothing follows it: a
    model that places a token by the tokens of its forward that are no pads would give it another
    position after a pad than a plain step does. Noise is looked at where a grid says what it makes
    of chances, and where it is known how the row draws.
    """

    def __init__(
        self,
        probability: Probability,
        num_ids: int = sys.maxsize,
        banned: int | None = None,
        draws: Draws | None = None,
        grid: NoiseGrid | None = None,
    ) -> None:
        self.probability = probability
        self.banned = banned
        self._num_ids = num_ids
        is_drawn = draws is not None and draws.temperature is not None
        self._draws = draws if is_drawn and grid is not None else None
        self._grid = NoiseGrid() if grid is None else grid
        self._noise: dict[int, NoiseOf | None] = {}  # For each depth of this step.

    def can_be_read(self, token: int) -> bool:
        return 0 <= token < self._num_ids and token != self.banned

    def begin(self) -> None:
        """To be called before each step: then the noise is that of other tokens."""
        self._noise = {}

    def ranked(self, evidence: dict[int, tuple[Evidence, ...]], depth: int) -> Siblings:
        """The likeliest tokens first, without those that the model can't read.

        An error if a token is no whole number, or if evidence is none.
        """
        # All of this runs for each candidate of each node: no calls but those that are needed.
        probability, num_ids, banned = self.probability, self._num_ids, self.banned
        ranked = [
            (probability(kinds), token, kinds, UNKNOWN)
            for token, kinds in evidence.items()
            if 0 <= token < num_ids and token != banned
        ]
        if (noise_of := self._noise_at(depth)) is not None:
            ranked = [self._drawn(candidate, noise_of) for candidate in ranked]
        ranked.sort(key=operator.itemgetter(0), reverse=True)
        return Siblings(
            tokens=[operator.index(token) for _, token, _, _ in ranked],
            probabilities=[chance for chance, _, _, _ in ranked],
            evidence=[kinds for _, _, kinds, _ in ranked],
            cells=[cell for _, _, _, cell in ranked],
        )

    def _drawn(self, candidate: _Candidate, noise_of: NoiseOf) -> _Candidate:
        """A candidate whose noise is known, unless its evidence knows it already."""
        chance, token, kinds, _ = candidate
        if kinds[-1].source in _KNOWING:
            return candidate
        chance, cell = self._grid.chance(chance, noise_of(token))
        return chance, token, kinds, cell

    def _noise_at(self, depth: int) -> NoiseOf | None:
        """The noise of the tokens at a depth, as far as it is known; looked up once in a step."""
        if self._draws is None:
            return None
        if depth not in self._noise:
            self._noise[depth] = self._draws.noise(depth)
        return self._noise[depth]
