"""The walk down a verified tree.

At each visited node the model's own next token is chosen as stock `generate()` would choose it;
the walk goes down where a child carries that token and ends where none does. So no draft,
however wrong, can change the text. Knows nothing of where drafts come from.
"""

from __future__ import annotations

from collections.abc import Callable

from selfspec.records import DraftTree

__all__ = ["walk"]


def walk(tree: DraftTree, commit: Callable[[int], tuple[int, bool]]) -> list[int]:
    """The accepted nodes, the root first.

    `commit(node)` chooses and commits the token behind `node`, and says whether the row stops
    with it. It is called once for each node of the path, in order.
    """
    node = 0
    path = [0]
    while True:
        token, stops = commit(node)
        child = tree.children[node].get(token)
        if stops or child is None:
            return path
        node = child
        path.append(node)
