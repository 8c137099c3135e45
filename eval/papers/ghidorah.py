"""Ghidorah: a tree and a width that fit the device, and attention in two parts.

"Ghidorah: Fast LLM Inference on Edge with Speculative Decoding and Hetero-Core Parallelism" (2025).
ARCA answers calibration questions and counts how often a candidate of some depth and rank comes
true. A tree takes the likeliest nodes by these accuracies, and is refined by what single places
brought; its acceptance length is 1 + the sum of its nodes' chances. The width is then the one whose
verification yields the most tokens a second on the device. HCMP splits linear layers by columns
between two units. Of attention, one has the dense part, which is the committed text, and the other
the sparse part, the tree; both are joined by an online softmax.

``as_in("ghidorah", tree="tree.json")``, with a file of ``python -m eval fit``: the tree
for a model and a machine. Our own tables draft in place of Medusa's trained heads.

What is read otherwise here: rates go by depth and rank where a single place was seldom tried, and
the tree that grows best-first by the rates of the places is the one that the paper's swaps of
single nodes reach. How rates are counted, how the width is chosen, and attention in two parts are
experiments of `python -m eval`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.draft.shape import Shape
from selfspec.draft.tree import TreeGrower, TreePlace
from selfspec.errors import ConfigError


@dataclass(frozen=True)
class FittedTree(Shape):
    """A shape: the same places in every step, the likeliest first, and parents before children.

    A place is a parent and a rank among the parent's candidates, from 0. Parent 0 is the root, and
    place i is node i + 1. `chances` are the counted chances that nodes are accepted. So the
    first places are themselves a tree, the best one of its width.

    >>> tree = FittedTree((0, 1, 0), (0, 0, 1), (0.6, 0.4, 0.2))
    >>> tree.width, tree.places()
    (4, ((0, 0), (1, 0), (0, 1)))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    chances: tuple[float, ...]

    def __post_init__(self) -> None:
        lists = (self.parents, self.ranks, self.chances)
        if len(set(map(len, lists))) > 1 or any(
            not (0 <= parent < node and rank >= 0 and 0 < chance <= 1)
            for node, (parent, rank, chance) in enumerate(zip(*lists, strict=True), start=1)
        ):
            raise ConfigError(
                "a fitted tree must have parents before children, ranks >= 0 and chances in "
                f"(0, 1], equally many of all (got {lists!r:.80})"
            )

    @property
    def width(self) -> int:
        return len(self.parents) + 1

    def places(self) -> Sequence[TreePlace]:
        return tuple(zip(self.parents, self.ranks, strict=True))

    def grow(self, grower: TreeGrower) -> None:
        grower.fill(self.places())

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FittedTree:
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**{name: tuple(column) for name, column in values.items()})
        except (AttributeError, OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"tree must be a file that 'python -m eval fit' made (got {str(path)!r}: {error})"
            ) from error


def method(
    *, tree: FittedTree | str | os.PathLike[str] | None = None, **options: Any
) -> dict[str, Any]:
    if tree is None:
        raise ConfigError(
            "as_in('ghidorah') needs a fitted tree (got none); make one with 'python -m eval fit' "
            "and pass its file as tree="
        )
    shape = tree if isinstance(tree, FittedTree) else FittedTree.load(tree)
    return {"shape": shape, "budget": "fixed", **options}
