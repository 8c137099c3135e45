"""The walk down verified trees.

At a visited node the model's own next token is chosen as plain `generate()` would choose it;
the walk goes down where a child carries that token and ends where none does. So no draft,
however wrong, can change the text. A draft whose keys or values are NaN turns the logits of other
nodes into NaN: there the walk ends before anything is chosen. Knows nothing of where drafts come
from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.records import DraftTree

Commit = Callable[[Sequence[int]], tuple[Sequence[int], bool] | None]


def walk(trees: Sequence[DraftTree], commit: Commit) -> list[list[int]]:
    """The accepted nodes of each tree, the root first, where all go down together.

    `commit(nodes)` chooses and commits the token after each tree's node, and says whether the
    text ends with them. It is called once a level, in order. The walk ends where one of the
    trees has no child for its token, or before these nodes if `commit` returns None.
    """
    nodes = [0] * len(trees)
    paths: list[list[int]] = [[] for _ in trees]
    while (committed := commit(nodes)) is not None:
        for path, node in zip(paths, nodes, strict=True):
            path.append(node)
        tokens, stops = committed
        below = [
            tree.children[node].get(token)
            for tree, node, token in zip(trees, nodes, tokens, strict=True)
        ]
        nodes = [node for node in below if node is not None]
        if stops or len(nodes) < len(below):
            break
    return paths
