"""Methods after published ones, as settings of one engine, so that only the drafts differ.

    lut-static        Token Recycling: one LUT, a tree of 80 drafted nodes that keeps its shape
    diaa              DIAA: rows that add and replace, a tree with its decays and its threshold
    lut-tree          DIAA with our tables: rows are replaced whole, no threshold
    self-draft        Self-Draft: branches of random tokens, a filling phase, n-grams and a corpus
    suffix-branches   Self-Draft with our context: suffix matching in place of n-grams
    switch            SAM decoding with Token Recycling: longest match, else a LUT tree

They are not the papers' own code, and differ from it. `lut-tree` knows a LUT's probabilities
rounded to powers of two. What the papers leave open is said where it is decided; the forward, the
KV and the walk are ours for all.
"""

from __future__ import annotations

from typing import Any

from eval.methods.diaa import DIAA_KNOBS, DiaaSource, RecordedProbabilities
from eval.methods.fixed_tree import NUM_DRAFTED, NUM_RANKS, fixed_shape
from eval.methods.method import Maker, Method, Resources, SelfSpecMethod
from eval.methods.self_draft import Filling, FreshFirst, GramSource, RandomStarts
from eval.methods.switch import SwitchSource
from selfspec import SelfSpec, StepRecord
from selfspec.draft.calibration import Calibration
from selfspec.draft.memory import Memory
from selfspec.draft.sources import LutSource

FIXED_NODES = NUM_DRAFTED + 1  # with the root


class Uncalibrated(Calibration):
    """Believes its prior for ever: nothing is counted."""

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned of it."""


class _Uncounted(SelfSpec):
    """A `SelfSpec` that trusts a prior instead of counting."""

    def _new_memory(self, vocab_size: int) -> Memory:
        memory = super()._new_memory(vocab_size)
        memory.calibration = Uncalibrated()
        return memory


class _FixedTree(_Uncounted):
    """A `SelfSpec` that drafts nodes of one shape."""

    def _new_memory(self, vocab_size: int) -> Memory:
        memory = super()._new_memory(vocab_size)
        memory.fitted = fixed_shape()
        return memory


class _Diaa(SelfSpec):
    """A `SelfSpec` whose one source are DIAA's tables; a loaded cache fills them."""

    def _new_memory(self, vocab_size: int) -> Memory:
        memory = super()._new_memory(vocab_size)
        (loaded,) = memory.sources
        assert isinstance(loaded, LutSource)
        source = DiaaSource(vocab_size, memory.top_k)
        source.restore(loaded.arrays())
        memory.sources, memory.calibration = [source], RecordedProbabilities()
        return memory


class _SelfDraft(SelfSpec):
    """A `SelfSpec` with Self-Draft's branches, its context cache, and a loaded corpus."""

    def _new_memory(self, vocab_size: int) -> Memory:
        memory = super()._new_memory(vocab_size)
        corpora = [source for source in memory.sources if source.name == "corpus"]
        fill = self.config.branch_length
        memory.sources = [Filling(source, fill) for source in (GramSource(), *corpora)]
        memory.calibration, memory.branches = FreshFirst(), RandomStarts
        return memory


class _Switch(SelfSpec):
    """A `SelfSpec` whose one source is the switch; the source knows its vocabulary when made."""

    def _new_memory(self, vocab_size: int) -> Memory:
        memory = super()._new_memory(vocab_size)
        memory.sources = [SwitchSource(vocab_size, memory.top_k)]
        return memory


def _maker(name: str, kind: type[SelfSpec], **knobs: Any) -> Maker:
    """Makes a method whose knobs are the asked ones but for those named here.

    None of them knows what a forward costs: their trees take all nodes that they may.
    """

    def make(given: Resources) -> Method:
        config = given.config.changed(budget="fixed", **knobs)
        return SelfSpecMethod(name, _with_loaded(kind(config), given.new_spec(config)))

    return make


def _with_loaded(spec: SelfSpec, plain: SelfSpec) -> SelfSpec:
    """Knows beforehand what `plain` does."""
    spec._loaded = plain._loaded
    return spec


PUBLISHED: dict[str, Maker] = {
    "lut-static": _maker(
        "lut-static",
        _FixedTree,
        max_nodes=FIXED_NODES,
        top_k=NUM_RANKS,
        sources=("lut",),
        num_branches=0,
        depth_decay=1.0,
        width_decay=1.0,
    ),
    "diaa": _maker("diaa", _Diaa, **DIAA_KNOBS),
    "lut-tree": _maker("lut-tree", _Uncounted, **{**DIAA_KNOBS, "threshold": 0.0}),
    "self-draft": _maker(
        "self-draft",
        _SelfDraft,
        sources=("context", "corpus"),
        num_branches=6,
        branch_length=6,
    ),
    "suffix-branches": _maker(
        "suffix-branches",
        _Uncounted,
        sources=("context", "corpus"),
        num_branches=6,
        branch_length=6,
    ),
    "switch": _maker("switch", _Switch, sources=(), num_branches=0, max_depth=64),
}
