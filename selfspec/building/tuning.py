"""Counts on calibration prompts which candidates come true, and fits trees to the counts.

The prompts are answered twice. First trees grow as usual. What is counted then leans towards nodes
that looked likely, since behind others nobody looks for candidates. The best shape by these counts
is filled in every step of the second round, whatever looks likely, and its counts are what trees
are fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from selfspec.cache import CacheContents
from selfspec.cost import CostCurve
from selfspec.errors import BuildError
from selfspec.fitting import AcceptanceCounts, Fit, TreeSearch
from selfspec.plugin.spec import SelfSpec
from selfspec.run.model import device_of
from selfspec.stats import GenerationStats

MOST_NODES = 64  # The widest tree that is fitted, and the width of those that count.


@dataclass
class Counted:
    """What came of one round over the prompts."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    stats: GenerationStats = field(default_factory=GenerationStats)


def count(
    model: Any,
    prompts: Sequence[Sequence[int]],
    contents: CacheContents,
    *,
    max_new_tokens: int,
    tell: Callable[[int], None],
    **knobs: Any,
) -> Counted:
    """Answers all prompts greedily, with drafts that start from the cache; the same every time.

    `tell` gets the number of new tokens after each prompt. The trees are of fixed width, or have
    the cache's shape where the knobs say ``budget="fitted"``.
    """
    knobs = {"budget": "fixed", "max_nodes": MOST_NODES, "strict": True, **knobs}
    spec = SelfSpec.from_contents(contents, **knobs)
    counted = Counted()
    with spec.listening(counted.counts.observe):
        for ids in prompts:
            input_ids = torch.tensor([list(ids)], device=device_of(model))
            model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                custom_generate=partial(spec, streamer=None),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            tell(spec.stats.num_new_tokens)
    counted.stats = spec.total_stats
    return counted


def start_shape(counted: Counted, contents: CacheContents, max_depth: int) -> CacheContents:
    """The cache with the shape for the second round in it."""
    if not counted.counts.hits:
        raise BuildError(
            f"tuning needs drafts that come true (got none in {counted.stats.num_steps} steps); "
            "give more prompts, or allow longer answers"
        )
    fit = TreeSearch(counted.counts, max_depth).fit(MOST_NODES, CostCurve({1: 1.0}))
    return replace(contents, fitted=fit.tree)


def fits_of(counted: Counted, curve: CostCurve, max_depth: int) -> list[Fit]:
    """The best tree of each width from 2 nodes on, as far as there are candidates for it."""
    search = TreeSearch(counted.counts, max_depth)
    fits = (search.fit(width, curve) for width in range(2, MOST_NODES + 1))
    return [fit for width, fit in enumerate(fits, start=2) if fit.tree.width == width]
