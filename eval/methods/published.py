"""Methods after published ones, as settings of one engine, so that only the drafts differ.

    lut-static        Token Recycling: one LUT, a tree of 80 drafted nodes that keeps its shape
    diaa              DIAA: recorded probabilities, a tree with its decays and its threshold
    diaa-merging      DIAA read otherwise: only a node's first choice may replace an entry
    lut-tree          DIAA with our coarse probabilities and no threshold
    self-draft        Self-Draft: branches of random tokens, a filling phase, n-grams and a corpus
    suffix-branches   Self-Draft with our context: suffix matching in place of n-grams
    switch            SAM decoding with Token Recycling: longest match, else a LUT tree

They are not the papers' own code, and differ from it. `lut-tree` knows a LUT's probabilities
rounded to powers of two. What the papers leave open is said where it is decided; the forward, the
KV and the walk are ours for all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from eval.methods.diaa import DIAA_KNOBS, DiaaSource, MergingSource, RecordedProbabilities
from eval.methods.fixed_tree import NUM_DRAFTED, NUM_RANKS, fixed_shape
from eval.methods.method import Maker, Method, Resources, SelfSpecMethod
from eval.methods.self_draft import Filling, FreshFirst, GramSource, RandomStarts
from eval.methods.switch import SwitchSource
from selfspec import SelfSpec, StepRecord
from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import Memory
from selfspec.draft.sources import LutSource

FIXED_NODES = NUM_DRAFTED + 1  # with the root
_BRANCH_LENGTH = 6
_Change = Callable[[Memory, int], None]  # with the size of the vocabulary


class Uncalibrated(Calibration):
    """Believes its prior for ever: nothing is counted."""

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned of it."""


class _Changed(SelfSpec):
    """Knows beforehand what `plain` does; what it learns in is changed as soon as it is made."""

    def __init__(self, plain: SelfSpec, change: _Change) -> None:
        super().__init__(plain.config)
        self._loaded, self._change = plain._loaded, change

    def memory(self, vocab_size: int) -> Memory:
        """What is learned, changed when it is new."""
        is_new = self._memory is None
        memory = super().memory(vocab_size)
        if is_new:
            self._change(memory, vocab_size)
        return memory


def _uncounted(memory: Memory, _vocab_size: int) -> None:
    """Trusts a prior instead of counting."""
    memory.calibration = Uncalibrated()


def _fixed_tree(memory: Memory, _vocab_size: int) -> None:
    """Drafts nodes of one shape."""
    memory.calibration, memory.fitted = Uncalibrated(), fixed_shape()


def _diaa(
    memory: Memory, vocab_size: int, tables: Callable[[int, int], DiaaSource] = DiaaSource
) -> None:
    """The one source are DIAA's tables; a loaded cache fills them."""
    (loaded,) = memory.sources
    assert isinstance(loaded, LutSource)
    source = tables(vocab_size, memory.top_k)
    source.restore(loaded.arrays())
    memory.sources, memory.calibration = [source], RecordedProbabilities()


def _self_draft(memory: Memory, _vocab_size: int) -> None:
    """Self-Draft's branches, its context cache, and a loaded corpus."""
    corpora = [source for source in memory.sources if source.name == "corpus"]
    memory.sources = [Filling(source, _BRANCH_LENGTH) for source in (GramSource(), *corpora)]
    memory.calibration, memory.branches = FreshFirst(), RandomStarts


def _switch(memory: Memory, vocab_size: int) -> None:
    """The one source is the switch, which knows its vocabulary when it is made."""
    memory.sources = [SwitchSource(vocab_size, memory.top_k)]


def _maker(name: str, change: _Change, **knobs: Any) -> Maker:
    """Makes a method whose knobs are the asked ones but for those named here.

    None of them knows what a forward costs: their trees take all nodes that they may.
    """

    def make(given: Resources) -> Method:
        config = given.config.changed(budget="fixed", **knobs)
        return SelfSpecMethod(name, _Changed(given.new_spec(config), change))

    return make


_BRANCHES: dict[str, Any] = {
    "sources": ("context", "corpus"),
    "num_branches": 6,
    "branch_length": _BRANCH_LENGTH,
}
PUBLISHED: dict[str, Maker] = {
    "lut-static": _maker(
        "lut-static",
        _fixed_tree,
        max_nodes=FIXED_NODES,
        top_k=NUM_RANKS,
        sources=("lut",),
        num_branches=0,
        depth_decay=1.0,
        width_decay=1.0,
    ),
    "diaa": _maker("diaa", _diaa, **DIAA_KNOBS),
    "diaa-merging": _maker("diaa-merging", partial(_diaa, tables=MergingSource), **DIAA_KNOBS),
    "lut-tree": _maker("lut-tree", _uncounted, **{**DIAA_KNOBS, "threshold": 0.0}),
    "self-draft": _maker("self-draft", _self_draft, **_BRANCHES),
    "suffix-branches": _maker("suffix-branches", _uncounted, **_BRANCHES),
    "switch": _maker("switch", _switch, sources=(), num_branches=0, max_depth=64),
}
