"""Ghidorah's fitted tree: one shape for every step, which a search fits to counts.

The questions are answered twice. First trees grow as usual. What is counted then leans towards
nodes that looked likely, since nobody looks for candidates behind the others. The best shape by
these counts is filled in every step of the second round, and trees are fitted to its counts.

A node is accepted if all candidates on the way to it come true, so its chance is the product of
their rates, and a tree is expected to yield 1 + the sum of its nodes' chances in tokens a step. A
child is never likelier than its parent, so adding the likeliest node next finds the best tree of
every width. The paper takes rates by depth and rank, and then swaps nodes by what was counted of
each single place; a tree that grows by the rates of the places is the one that such swaps reach.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from eval.benches.prompts import load_questions
from eval.errors import EvalError
from eval.models.loading import load_asked, load_tokenizer
from selfspec import SelfSpec, SpecConfig, StepRecord, attach
from selfspec.cache import CacheContents, check_target, load_cache, save_cache, tokenizer_info
from selfspec.draft.fitted import FittedTree

Path = tuple[int, ...]  # The ranks that lead to a node: (0, 2) is the third candidate of the first.
# The rates of the candidates behind a node, by rank; none where a tree may not be deeper.
Rates = Callable[[Path], Sequence[float]]

MOST_NODES = 64  # The widest tree that is fitted, and the width of those that count.
_SHOWN = (2, 4, 8, 16, 32, 64)  # The widths of the paper's table.
_DEPTHS, _RANKS = 5, 8  # What the tables of rates show.
# What is known of less exact kinds counts as much as this many trials: of the level above for a
# level, and of the whole level for a single place.
_TRUST = 8.0


def best_tree(rates: Rates, num_drafted: int) -> FittedTree:
    """The likeliest nodes below the root, likeliest first; fewer where no more can come true.

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


class Counts:
    """How often the candidate at each place came true, given that its parent had."""

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
            hits = (self.hits[(*path, rank)] for rank in range(len(level)))
            return [(hit + _TRUST * rate) / total for hit, rate in zip(hits, level, strict=True)]

        return rates_behind

    def __str__(self) -> str:
        """How often each candidate of the first levels came true, in per cent."""
        trials, hits = self.levels()
        lines = [f"depth  steps {''.join(f'{rank + 1:>6}.' for rank in range(_RANKS))}"]
        for depth in range(_DEPTHS):
            if trials[depth]:
                shares = (hits[depth, rank] / trials[depth] for rank in range(_RANKS))
                cells = "".join(f"{100 * share:7.1f}" for share in shares)
                lines.append(f"{depth + 1:5} {trials[depth]:6} {cells}")
        return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Fits a tree, puts it into a cache, and prints what was counted and expected."""
    check_target(options.out)
    tokenizer = load_tokenizer(options.model)
    prompts = [ids for _, ids in load_questions(options, tokenizer)]
    contents = CacheContents(tokenizer=tokenizer_info(tokenizer))
    if options.cache is not None:
        contents = load_cache(options.cache, tokenizer=tokenizer)
    model, max_depth = attach(load_asked(options)), SpecConfig().max_depth

    def counted(held: CacheContents, budget: str) -> Counts:
        spec = SelfSpec.from_contents(held, budget=budget, max_nodes=MOST_NODES, strict=True)
        counts = _counted(model, prompts, spec, options.max_new_tokens)
        rate = spec.total_stats.tokens_per_step
        print(f"\n{rate:.2f} tokens a step with trees of budget={budget!r}; right, in per cent:")
        print(counts)
        if not counts.hits:
            raise EvalError("drafts must come true somewhere (got none); give more --questions")
        return counts

    grown = counted(contents, "fixed")
    start = best_tree(grown.rates(max_depth), MOST_NODES - 1)
    shaped = counted(replace(contents, fitted=start), "fitted")
    tree = best_tree(shaped.rates(max_depth), MOST_NODES - 1)
    seconds = _measured_seconds(model, prompts, options.max_new_tokens, tree.width)
    rates = {width: (1 + sum(tree.chances[: width - 1])) / s for width, s in seconds.items()}
    width = options.width or max(list(rates)[1:], key=rates.__getitem__)
    if width not in rates:
        raise EvalError(f"--width must be 2 to {tree.width}, as many as came true (got {width})")
    print("\nwidth  expected tokens a step      ms  tokens a second")
    for shown in sorted({1, width, *(each for each in _SHOWN if each in rates)}):
        cells = f"{rates[shown] * seconds[shown]:22.2f} {1000 * seconds[shown]:7.1f}"
        print(f"{shown:5}  {cells} {rates[shown]:16.1f}{'  kept' * (shown == width)}")
    kept = FittedTree(*(values[: width - 1] for values in (tree.parents, tree.ranks, tree.chances)))
    save_cache(options.out, replace(contents, fitted=kept))
    print(f"\n{options.out} holds the tree: --cache {options.out} --knob budget=fitted")
    return 0


def _counted(
    model: Any, prompts: Sequence[torch.Tensor], spec: SelfSpec, max_new_tokens: int
) -> Counts:
    """Answers all prompts greedily."""
    counts = Counts()
    with spec.listening(counts.observe):
        for ids in prompts:
            model.generate(
                ids.to(model.device),
                attention_mask=torch.ones_like(ids, device=model.device),
                assistant=spec,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
    return counts


def _measured_seconds(
    model: Any, prompts: Sequence[torch.Tensor], max_new_tokens: int, widest: int
) -> dict[int, float]:
    """What a forward of each width costs behind a text as long as these are in their middle."""
    from selfspec.run.profile import profile

    length = int(median(ids.shape[1] for ids in prompts)) + max_new_tokens // 2
    _, curve = profile(model, SpecConfig(), num_columns=length, num_rows=1, max_seconds=10.0)
    return {width: curve.seconds(width) for width in range(1, widest + 1)}
