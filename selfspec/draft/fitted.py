"""A fitted tree: one shape for every step, found beforehand by counting.

Knows places, not tokens: each step fills them with the candidates that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.draft.shape import Place, Shape

__all__ = ["FittedTree"]

_WIDEST = 1024
_FIELDS = ("parents", "ranks", "chances")


@dataclass(frozen=True)
class FittedTree(Shape):
    """The places below the root as parallel tuples, the likeliest first, and parents before them.

    A node's place is its parent and its rank among the parent's candidates, from 0. Parents are
    numbered as in a tree: 0 is the root, and place i is node i + 1. `chances` says how likely each
    node is accepted, by what was counted. So the first places are themselves a tree, the best one
    of its width.

    >>> tree = FittedTree((0, 1, 0), (0, 0, 1), (0.6, 0.4, 0.2))
    >>> tree.width, round(tree.expected, 6), tree.places()
    (4, 2.2, ((0, 0), (1, 0), (0, 1)))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    chances: tuple[float, ...]

    @property
    def width(self) -> int:
        """The nodes of a tree in which nothing is missing, the root included."""
        return len(self.parents) + 1

    @property
    def expected(self) -> float:
        """Tokens a step, by the counts: the model's own, and each node by its chance."""
        return 1 + sum(self.chances)

    def places(self) -> Sequence[Place]:
        """The parent and the rank of each."""
        return tuple(zip(self.parents, self.ranks, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {name: list(getattr(self, name)) for name in _FIELDS}

    @classmethod
    def from_dict(cls, values: object) -> FittedTree:
        """Back from `as_dict`; raises `ValueError`, which says what must hold, for anything else.

        >>> FittedTree.from_dict({"parents": [1], "ranks": [0], "chances": [0.5]})
        Traceback (most recent call last):
        ValueError: a fitted tree whose parents come before their children (got 1 above node 1)
        """
        if not isinstance(values, Mapping) or set(values) != set(_FIELDS):
            raise ValueError(f"a fitted tree with {', '.join(_FIELDS)}")
        parents, ranks, chances = (values[name] for name in _FIELDS)
        lists = (parents, ranks, chances)
        if not all(type(x) is list for x in lists) or len(set(map(len, lists))) != 1:
            raise ValueError("a fitted tree of three lists of one length")
        if not 1 <= len(parents) < _WIDEST:
            raise ValueError(f"a fitted tree of 2 to {_WIDEST} nodes (got {len(parents) + 1})")
        above = [1.0]  # The chance of each node.
        for node, place in enumerate(zip(*lists, strict=True), start=1):
            above.append(_checked(node, place, above))
        if len(set(zip(parents, ranks, strict=True))) != len(parents):
            raise ValueError("a fitted tree that has no place twice")
        return cls(tuple(parents), tuple(ranks), tuple(map(float, chances)))


def _checked(node: int, place: tuple[Any, Any, Any], above: list[float]) -> float:
    """The chance of a node, whose place must be sound."""
    parent, rank, chance = place
    if type(parent) is not int or not 0 <= parent < node:
        raise ValueError(
            f"a fitted tree whose parents come before their children (got {parent!r:.40} above "
            f"node {node})"
        )
    if type(rank) is not int or rank < 0:
        raise ValueError(f"a fitted tree with ranks >= 0 (got {rank!r:.40})")
    if type(chance) not in (int, float) or not 0 < chance <= above[parent]:
        raise ValueError(
            f"a fitted tree whose chances are > 0 and at most those above (got {chance!r:.40})"
        )
    return float(chance)
