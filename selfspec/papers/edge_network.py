"""Edge networks: two base stations, a pipeline between them, and who is served with whom.

"Efficient LLM Inference over Heterogeneous Edge Networks with Speculative Decoding". A small base
station drafts for all users with a small model, and a large one verifies. Users share a band of W
Hz for their prompts (equations 26 and 27). Prompts are sorted by their lengths and split into
batches; a batch is verified while the next one is drafted (equations 20 to 22). A dynamic program
finds the batches (algorithm 1), and the number of drafts in a step is tried out.

selfspec has one machine, so the paper has no method for `SelfSpec`; its order is `ShortestFirst`.
`WholeBatches` is algorithm 1 for one machine, for ``generate_many(scheduler=...)``. The network
itself is simulated by ``python -m eval edge_network``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


def split(boundary: Sequence[int]) -> list[tuple[int, int]]:
    """The batches that lead to the last prompt."""
    batches: list[tuple[int, int]] = []
    end = len(boundary) - 1
    while end:
        batches.insert(0, (boundary[end], end))
        end = boundary[end]
    return batches


class WholeBatches(NamedTuple):
    """A scheduler: algorithm 1 for one machine, whose batches run to their ends."""

    seconds: Callable[[int, int], float]  # Of a step, by rows and by the tokens of the longest one.

    def choose(self, waiting: Sequence[int], running: Sequence[int], num_free: int) -> list[int]:
        order = sorted(range(len(waiting)), key=waiting.__getitem__)
        least = [0.0]
        boundary = [0]
        for end in range(1, len(order) + 1):
            longest = waiting[order[end - 1]]
            fitting = (j for j in range(end) if (end - j) * longest <= num_free or j == end - 1)
            cost, start = min((least[j] + self.seconds(end - j, longest), j) for j in fitting)
            least.append(cost)
            boundary.append(start)
        return order[: split(boundary)[0][1]] if order and not running else []
