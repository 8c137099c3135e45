"""Methods after published ones: those of `eval.papers`, and two that they compare with.

They are not the papers' own code, and differ from it. What the papers leave open is said where it
is decided; the forward, the KV and the walk are ours for all. Their trees take all nodes that they
may: none of them knows what a forward costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from eval.fit.accuracies import best_tree
from eval.methods.lookahead import lookahead
from eval.methods.method import Maker, Method, MethodError, Resources, SelfSpecMethod
from eval.methods.sam import SamSource
from eval.papers import method_of
from eval.papers.diaa import DynamicTree
from eval.papers.edgellm import Fallback
from eval.papers.ghidorah import FittedTree
from eval.papers.self_draft import Branches, ContextCache, CorpusCache
from selfspec.cache import CacheContents
from selfspec.draft.calibration import FixedPrior
from selfspec.draft.shape import Shape
from selfspec.draft.sources.answers import AnswersSource
from selfspec.draft.tree import TreeGrower

FIXED_NODES = 81  # Token Recycling's, the root among them.
# How often the entries of a LUT's row came true, by rank, whatever the depth: counted as the first
# round of `python -m eval fit` does, with the LUT alone, on 16 questions of MT-bench, 48 new tokens
# each (SmolLM2-135M-Instruct, float32).
_RANK_RATES = (0.323, 0.075, 0.049, 0.031, 0.017, 0.019, 0.032, 0.007)


class Datastore(AnswersSource):
    """Texts that are there from the start, after REST; of equal places the newest alone drafts."""

    name = "datastore"

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> Datastore:
        """A memory that is as large as these texts in ids."""
        tokens = np.array([each for text in texts for each in (*text, -1)], np.int32)
        store = cls(len(tokens))
        store.restore({"tokens": tokens})
        return store


class Chain(Shape):
    """No branches."""

    def grow(self, grower: TreeGrower) -> None:
        """Only the likeliest tokens."""
        grower.best_first(score=lambda chance, _depth, rank: None if rank else chance)


@cache
def fixed_shape() -> FittedTree:
    """Token Recycling's kind of tree: the likeliest 80 places, whatever the tables say."""
    return best_tree(lambda _: _RANK_RATES, FIXED_NODES - 1)


def _maker(name: str, arguments: Callable[[Resources], dict[str, Any]]) -> Maker:
    """Makes a method of these arguments of `SelfSpec`, which win over the knobs that are asked."""

    def make(given: Resources) -> Method:
        found = {"budget": "fixed", **arguments(given)}
        return SelfSpecMethod(name, given.new_spec(given.config, **found))

    return make


def _as_in(paper: str, **own: Any) -> Callable[[Resources], dict[str, Any]]:
    return lambda given: method_of(paper, **{**own, **given.options})


def _edgellm(given: Resources) -> dict[str, Any]:
    """Also with parts of its own: `order` and `rule` by name, `alpha` and `factor`."""
    if given.assistant is None:
        raise MethodError("method 'edgellm' must have --assistant-model (got none); name one")
    options = dict(given.options)
    order, rule = options.pop("order", "pacer"), options.pop("rule", "as written")
    # One node more: the root is none of the paper's.
    nodes = given.config.max_nodes + 1
    found = method_of("edgellm", draft_model=given.assistant, max_nodes=nodes)
    if order != "pacer":
        found["shape"] = Chain() if order == "chain" else None
    return {**found, "budget": Fallback(**options) if rule == "as written" else "fixed"}


def _self_draft(given: Resources, **own: Any) -> dict[str, Any]:
    """The texts of the cache are the corpus."""
    more = {**own, **given.options}
    return method_of(
        "self-draft", max_nodes=given.config.max_nodes, corpus=_corpus(given.contents), **more
    )


def _corpus(contents: CacheContents | None) -> CorpusCache | None:
    if contents is None or contents.answers is None:
        return None
    texts = np.split(contents.answers, np.flatnonzero(contents.answers < 0) + 1)
    return CorpusCache(text[text >= 0].tolist() for text in texts)


def _with_branches(given: Resources) -> dict[str, Any]:
    branches = Branches(**given.options, fills=False)
    max_nodes = given.config.max_nodes + branches.num_nodes
    return {"extra_sources": [ContextCache()], "shape": branches, "max_nodes": max_nodes}


def _keeping_shapes(given: Resources) -> dict[str, Any]:
    return {"shape": DynamicTree(delta=1.0, alpha=1.0, tau=0.0, **given.options)}


def _rest(given: Resources) -> dict[str, Any]:
    store = Datastore.of(given.datastore)
    return {"sources": (), "extra_sources": [store], "learning": "frozen", "max_depth": 64}


_LUT: dict[str, Any] = {"sources": ("lut",), "calibration": FixedPrior(), "top_k": 8}
_MAKERS: dict[str, Callable[[Resources], dict[str, Any]]] = {
    "token-recycling": lambda _: {**_LUT, "shape": fixed_shape(), "max_nodes": FIXED_NODES},
    "lookahead": lambda given: lookahead(**given.options),
    "diaa": _as_in("diaa"),
    "lut-tree": lambda _: {**_LUT, "shape": DynamicTree(tau=0.0)},
    "self-draft": _self_draft,
    "suffix-branches": partial(_self_draft, sources=("context",), calibration=FixedPrior()),
    "edgellm": _edgellm,
    "ghidorah": lambda given: method_of("ghidorah", tree=given.tree, **given.options),
    "selfspec-branches": _with_branches,
    "selfspec-intervals": _keeping_shapes,
    "suffix": lambda _: {"sources": ("context", "answers"), "max_depth": 64},
    "rest": _rest,
    "sam": lambda given: {
        "sources": (),
        "extra_sources": [SamSource(given.config.top_k)],
        "max_depth": 64,
    },
}
PUBLISHED: dict[str, Maker] = {name: _maker(name, arguments) for name, arguments in _MAKERS.items()}
