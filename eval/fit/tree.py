"""Ghidorah's fitted tree: one shape for every step, which a search fits to counts.

The questions are answered twice. First trees grow as usual. What is counted then leans towards
nodes that looked likely, since nobody looks for candidates after the others. The best shape by
these counts is filled in every step of the second round, and trees are fitted to its counts.

The search and the counts are in `accuracies`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from eval.benches.prompts import load_questions
from eval.errors import EvalError
from eval.fit.accuracies import Accuracies, best_tree, fastest_width
from eval.models.loading import load_asked, load_tokenizer
from eval.papers.ghidorah import FittedTree
from eval.runs.timing import learned_curve
from selfspec import SelfSpec, SpecConfig
from selfspec.cache import CacheContents, load_cache, tokenizer_info

MOST_NODES = 64  # The widest tree that is fitted, and the width of those that count.
_SHOWN = (2, 4, 8, 16, 32, 64)  # The widths of the paper's table.
_DEPTHS, _RANKS = 5, 8  # What the tables of rates show.


def shown(accuracies: Accuracies) -> str:
    """How often each candidate of the first levels came true, in per cent."""
    trials, hits = accuracies.levels()
    lines = [f"depth  steps {''.join(f'{rank + 1:>6}.' for rank in range(_RANKS))}"]
    for depth in range(_DEPTHS):
        if trials[depth]:
            shares = (hits[depth, rank] / trials[depth] for rank in range(_RANKS))
            cells = "".join(f"{100 * share:7.1f}" for share in shares)
            lines.append(f"{depth + 1:5} {trials[depth]:6} {cells}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> int:
    """Fits a tree, writes it to a file, and prints what was counted and expected."""
    if options.out.exists():
        raise EvalError(f"--out must not be there yet (got {str(options.out)!r}); name another")
    tokenizer = load_tokenizer(options.model)
    prompts = [ids for _, ids in load_questions(options, tokenizer)]
    contents = CacheContents(tokenizer=tokenizer_info(tokenizer))
    if options.cache is not None:
        contents = load_cache(options.cache, tokenizer=tokenizer)
    model, max_depth = load_asked(options), SpecConfig().max_depth

    def counted(which: str, **shape: Any) -> Accuracies:
        knobs: Any = {"budget": "fixed", "max_nodes": MOST_NODES}
        spec = SelfSpec(contents=contents, **knobs, **shape)
        accuracies = _counted(model, prompts, spec, options.max_new_tokens)
        rate = spec.total_stats.tokens_per_step
        print(f"\n{rate:.2f} tokens a step with trees {which}; right, in per cent:")
        print(shown(accuracies))
        if not accuracies.hits:
            raise EvalError("drafts must come true somewhere (got none); give more --questions")
        return accuracies

    grown = counted("that grow anew in each step")
    start = best_tree(grown.rates(max_depth), MOST_NODES - 1)
    shaped = counted("of one shape", shape=start)
    tree = best_tree(shaped.rates(max_depth), MOST_NODES - 1)
    seconds = _measured_seconds(model, prompts, options.max_new_tokens, tree.width)
    width = options.width or fastest_width(tree, seconds)
    if not 2 <= width <= tree.width:
        raise EvalError(f"--width must be 2 to {tree.width}, as many as came true (got {width})")
    print("\nwidth  expected tokens a step      ms  tokens a second")
    for each in sorted({1, width, *(n for n in _SHOWN if n <= tree.width)}):
        tokens = 1 + sum(tree.chances[: each - 1])
        cells = f"{tokens:22.2f} {1000 * seconds[each]:7.1f}"
        kept = "  kept" * (each == width)
        print(f"{each:5}  {cells} {tokens / seconds[each]:16.1f}{kept}")
    most = width - 1
    kept_tree = FittedTree(tree.parents[:most], tree.ranks[:most], tree.chances[:most])
    kept_tree.save(options.out)
    print(f"\n{options.out} holds the tree: --methods ghidorah --tree {options.out}")
    return 0


def _counted(
    model: Any, prompts: Sequence[torch.Tensor], spec: SelfSpec, max_new_tokens: int
) -> Accuracies:
    """Answers all prompts greedily."""
    accuracies = Accuracies()
    with spec.listening(accuracies.observe):
        for ids in prompts:
            model.generate(
                ids.to(model.device),
                attention_mask=torch.ones_like(ids, device=model.device),
                assistant=spec,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
    return accuracies


def _measured_seconds(
    model: Any, prompts: Sequence[torch.Tensor], max_new_tokens: int, widest: int
) -> list[float]:
    """What a forward of each width costs after texts like these, as answers to them show."""
    spec = SelfSpec()
    _counted(model, prompts, spec, max_new_tokens)
    length = int(median(ids.shape[1] for ids in prompts)) + max_new_tokens // 2
    curve = learned_curve(spec.runner(model).costs, spec.stats.forward, length)
    if curve is None:
        raise EvalError("answers are too short to show what steps cost; give more tokens")
    return curve.table(widest)
