"""Ghidorah: a tree and a width that fit the device, and attention in two parts.

"Ghidorah: Fast LLM Inference on Edge with Speculative Decoding and Hetero-Core Parallelism" (2025).
ARCA answers calibration questions and counts how often the candidate of each depth and rank comes
true. A tree takes the likeliest nodes by these accuracies, and is refined by what each single place
brought; its acceptance length is 1 + the sum of its nodes' chances. The width is then the one whose
verification yields the most tokens a second on the device. HCMP splits linear layers by columns
between two units. Of attention, one has the dense part, which is the committed text, and the other
the sparse part, the tree; both are joined by an online softmax.

``SelfSpec.as_in("ghidorah", cache=...)``, with a cache that ``python -m eval fit`` made: it holds
the tree for a model and a machine. Our own tables draft in place of Medusa's trained heads.

What is read otherwise here: rates go by depth and rank where a single place was seldom tried, and
the tree that grows best-first by the rates of the places is the one that the paper's swaps of
single nodes reach.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from selfspec.cache import CacheContents
from selfspec.compat.kernels import attention_and_sums
from selfspec.draft.fitted import FittedTree
from selfspec.errors import ConfigError
from selfspec.records import StepRecord

__all__ = ["Accuracies", "Parts", "best_tree", "best_width", "in_two_parts", "method"]

Tensors = Sequence[torch.Tensor]
Path = tuple[int, ...]  # The ranks that lead to a node: (0, 2) is the third candidate of the first.
# The rates of the candidates behind a node, by rank; none where a tree may not be deeper.
Rates = Callable[[Path], Sequence[float]]

# What is known of less exact kinds counts as much as this many trials: of the level above for a
# level, and of the whole level for a single place.
_TRUST = 8.0


def best_tree(rates: Rates, num_drafted: int) -> FittedTree:
    """A shape: the likeliest nodes below the root, likeliest first, as many as can come true.

    A child is never likelier than its parent, so the likeliest node next gives the best tree of
    every width.

    >>> best_tree(lambda path: (0.5, 0.4) if len(path) < 2 else (), 3)
    FittedTree(parents=(0, 0, 1), ranks=(0, 1, 0), chances=(0.5, 0.4, 0.25))
    """
    parents, ranks, chances = list[int](), list[int](), list[float]()
    waiting: list[tuple[float, Path, int]] = []

    def add_children(path: Path, node: int, chance: float) -> None:
        for rank, rate in enumerate(rates(path)):
            if rate > 0:
                heapq.heappush(waiting, (-chance * rate, (*path, rank), node))

    add_children((), 0, 1.0)
    while waiting and len(parents) < num_drafted:
        negative, path, parent = heapq.heappop(waiting)
        parents.append(parent)
        ranks.append(path[-1])
        chances.append(-negative)
        add_children(path, len(parents), -negative)
    return FittedTree(tuple(parents), tuple(ranks), tuple(chances))


def best_width(tree: FittedTree, seconds: Sequence[float]) -> int:
    """The width that yields the most tokens a second, 2 at least; `seconds` are by width."""
    tokens = [1.0, 1.0]
    for chance in tree.chances:
        tokens.append(tokens[-1] + chance)
    widths = range(2, min(len(tokens), len(seconds)))
    return max(widths, key=lambda width: tokens[width] / seconds[width])


class Accuracies:
    """How often the candidate at each place came true, given that its parent had.

    `SelfSpec.listening(accuracies.observe)` counts.
    """

    def __init__(self) -> None:
        self.trials: Counter[Path] = Counter()  # How often a true node's candidates were looked at.
        self.hits: Counter[Path] = Counter()  # How often a candidate came true.

    def observe(self, record: StepRecord) -> None:
        """Follows the committed tokens down the tree, as far as candidates were looked at.

        A candidate counts also where the budget left no node for it. What comes behind a node
        whose candidates nobody looked at is unknown, and not counted.
        """
        path: Path = ()
        for node, token in zip(record.path, record.committed_ids, strict=False):
            siblings = record.tree.looked_at[node]
            if siblings is None:
                return
            self.trials[path] += 1
            if token not in siblings.tokens:
                return
            path = (*path, siblings.tokens.index(token))
            self.hits[path] += 1

    def levels(self) -> tuple[Counter[int], Counter[tuple[int, int]]]:
        """Trials by the depth of the parent, and hits by that depth and the rank."""
        trials, hits = Counter[int](), Counter[tuple[int, int]]()
        for path, number in self.trials.items():
            trials[len(path)] += number
        for path, number in self.hits.items():
            hits[len(path) - 1, path[-1]] += number
        return trials, hits

    def rates(self, max_depth: int) -> Rates:
        """The rate of each place. A place with few trials leans on its level, and so on upwards."""
        trials, hits = self.levels()
        above = [0.0] * (1 + max((path[-1] for path in self.hits), default=-1))
        levels: list[list[float]] = []
        for depth in range(max_depth):
            trust = _TRUST if depth else 0.0
            total = trials[depth] + trust
            above = [
                (hits[depth, rank] + trust * rate) / total if total else 0.0
                for rank, rate in enumerate(above)
            ]
            levels.append(above)

        def rates_behind(path: Path) -> list[float]:
            level = levels[len(path)] if len(path) < max_depth else []
            total = self.trials[path] + _TRUST
            places = [(*path, rank) for rank in range(len(level))]
            return [
                (self.hits[place] + _TRUST * rate) / total
                for place, rate in zip(places, level, strict=True)
            ]

        return rates_behind


class Parts(NamedTuple):
    """What one layer asks; heads that share keys are joined into one with more queries."""

    query: torch.Tensor  # (B, H, N, D)
    text: Tensors  # The committed text's keys and values, (B, H, columns, D) each.
    tree: Tensors  # Those of the tree, (B, H, nodes, D).
    mask: torch.Tensor  # (B, 1, N, nodes): additive, over the tree

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return float(self.query.shape[-1] ** -0.5)


def in_two_parts(parts: Parts) -> torch.Tensor:
    """The outcome (B, H, N, D); equal to that of masked attention, except for rounding.

    The dense part needs no mask, so torch's fast kernel computes it. Beside the tree's keys, the
    committed text is one more key: its score is that part's log-sum-exp, its value the outcome.
    """
    key, value = parts.text
    text, score = attention_and_sums(parts.query, key, value, parts.scale)
    # In half precision a rounded score would be off by more than torch's own kernels are.
    nodes = parts.query.float() @ parts.tree[0].float().mT
    scores = torch.cat([nodes * parts.scale + parts.mask, score[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)
    tree = weights[..., :-1] @ parts.tree[1].float()
    return torch.addcmul(tree, text.float(), weights[..., -1:]).to(parts.query.dtype)


def method(contents: CacheContents | None = None, **options: Any) -> dict[str, Any]:
    """The arguments of `SelfSpec`."""
    if contents is None or contents.fitted is None:
        got = "no cache" if contents is None else "a cache without one"
        raise ConfigError(
            f"as_in('ghidorah') needs a cache with a fitted tree (got {got}); make one with "
            "'python -m eval fit' and pass it as cache="
        )
    return {"shape": contents.fitted, "budget": "fixed", **options}


# The paper, on MT-bench with Medusa's heads, at 2, 4, 8, 16, 32 and 64 nodes: 1.72, 2.28, 2.59,
# 2.93, 3.19 and 3.34 tokens a step. Here, fitted to MT-bench and used on the other tasks of
# Spec-Bench, 48 tokens: 1.25, 1.48, 1.72, 1.91, 2.09 and 2.27; trees that grow bring 1.25, 1.52,
# 1.75, 2.06, 2.31 and 2.62. Trained heads know from the first token on what tables learn. The
# paper's sparse attention is 1.90 times as fast as a dense mask; two parts are 0.84 to 1.07 times
# as fast as one mask without copies. (SmolLM2-135M-Instruct, float32, two cores.) By:
#     python -m eval fit --width 64 --out fitted …; python -m eval study fitted --cache fitted …
#     python -m eval hetero --attention --columns 512 4096 --width 16 64
