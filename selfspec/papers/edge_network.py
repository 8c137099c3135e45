"""Edge networks: two base stations, a pipeline between them, and who is served with whom.

"Efficient LLM Inference over Heterogeneous Edge Networks with Speculative Decoding". A small base
station drafts for all users with a small model, and a large one verifies. Users share a band of W
Hz for their prompts (equations 26 and 27). Prompts are sorted by their lengths and split into
batches; a batch is verified while the next one is drafted (equations 20 to 22). A dynamic program
finds the batches (algorithm 1), and the number of drafts in a step is tried out.

selfspec has one machine, so the paper has no method for `SelfSpec`; its order is `ShortestFirst`.
On one machine, algorithm 1 was no faster. The network itself is simulated by
``python -m eval edge_network``.
"""

from __future__ import annotations

from collections.abc import Sequence


def split(boundary: Sequence[int]) -> list[tuple[int, int]]:
    """The batches that lead to the last prompt."""
    batches: list[tuple[int, int]] = []
    end = len(boundary) - 1
    while end:
        batches.insert(0, (boundary[end], end))
        end = boundary[end]
    return batches
