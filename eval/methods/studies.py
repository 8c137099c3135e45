"""The experiments of the papers that selfspec builds on, to be made on the model at hand.

A study is a run whose contestants are one method with different knobs, all interleaved; its
report has a row for each. What the papers measured was on their own models and machines, and is
theirs to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import EvalError
from selfspec.config import SOURCE_NAMES
from selfspec.errors import unknown_name

_WIDTHS = (2, 4, 8, 16, 32, 64)
_THRESHOLDS = ((0.1, 0.5), (0.01, 0.5), (0.001, 0.5), (0.01, 0.1), (0.01, 0.9))
_STATIC_NODES = 81  # Those of `token-recycling`, so that both trees of "parts" are as large.


class Variant(NamedTuple):
    """A method with knobs that are its own, a cache where it starts with one, and options."""

    method: str
    knobs: Mapping[str, Any]
    cache: str | None = None
    options: Mapping[str, Any] = {}


class Study(NamedTuple):
    """What is asked, after which experiment, and who takes part."""

    title: str
    after: str
    variants: Mapping[str, Variant]
    takes_caches: bool = False  # each makes one more variant


def named_study(name: str) -> Study:
    """An unknown one is answered with the nearest."""
    if name not in STUDIES:
        raise EvalError(unknown_name("study", name, STUDIES))
    return STUDIES[name]


def variants_of(study: Study, caches: Sequence[str]) -> dict[str, Variant]:
    """Who takes part: those of the study, and one for each cache where it compares caches."""
    if not caches and study.takes_caches:
        raise EvalError("this study must have --caches CACHE … (got none): it compares them")
    if caches and not study.takes_caches:
        raise EvalError(f"--caches must not be given to this study (got {', '.join(caches)})")
    names = [Path(cache).name for cache in caches]
    for name, number in Counter([*study.variants, *names]).items():
        if number > 1:
            raise EvalError(f"--caches must each have a last name of their own (got two {name!r})")
    mine = {name: _fixed()._replace(cache=cache) for name, cache in zip(names, caches, strict=True)}
    return {**study.variants, **mine}


def _fixed(**knobs: Any) -> Variant:
    """Every tree takes all its nodes, and branches always ride along.

    Under a measured budget neither the width nor the branches would be those that are compared.
    """
    return Variant("selfspec", {"budget": "fixed", **knobs})


def _edgellm(max_nodes: int, **options: Any) -> Variant:
    return Variant("edgellm", {"max_nodes": max_nodes}, options=options)


_STOCK = Variant("stock", {})
_NO_LUTS = [name for name in SOURCE_NAMES if name not in ("lut", "lut2")]

STUDIES: dict[str, Study] = {
    "tasks": Study(
        "goodput, latency and speed-up by task",
        "DIAA, tables 1 and 2; Self-Draft, table 2",
        {
            "stock": _STOCK,
            "draft model": Variant("assisted", {}),
            "prompt lookup": Variant("prompt-lookup", {}),
            "SAM-Decoding": Variant("sam", {}),
            "Token Recycling": Variant("token-recycling", {}),
            "DIAA": Variant("diaa", {}),
            "Self-Draft": Variant("self-draft", {}),
            "Self-Draft, our branches": Variant("suffix-branches", {}),
            "selfspec": _fixed(),
        },
    ),
    "parts": Study(
        "what LUTs and dynamic trees are worth",
        "DIAA, table 3",
        {
            "stock": _STOCK,
            "all": _fixed(),
            "no LUTs": _fixed(sources=_NO_LUTS),
            "DIAA": Variant("diaa", {"max_nodes": _STATIC_NODES}),
            "DIAA, no threshold": Variant("lut-tree", {"max_nodes": _STATIC_NODES}),
            "LUT, static tree": Variant("token-recycling", {}),
            "neither": Variant("prompt-lookup", {}),
        },
    ),
    "tables": Study(
        "what LUTs take, and what they bring, by the candidates that they keep",
        "DIAA, table 4",
        {"stock": _STOCK, **{f"top {k}": _fixed(top_k=k) for k in (2, 4, 8, 16, 32)}},
    ),
    "starts": Study(
        "what LUTs and corpora filled beforehand from different data bring; pass --caches",
        "DIAA, figure 9",
        {"stock": _STOCK, "cold": _fixed()},
        takes_caches=True,
    ),
    "shapes": Study(
        "nodes of a tree, and steps for which it keeps its shape",
        "DIAA, figure 8",
        {
            "stock": _STOCK,
            **{
                f"{nodes} nodes, {steps} steps": Variant(
                    "selfspec-intervals", {"max_nodes": nodes}, options={"interval": steps}
                )
                for nodes, steps in product((8, 16, 32, 64), (1, 4, 16))
            },
            **{
                f"DIAA, 64 nodes, {steps} steps": Variant(
                    "diaa", {"max_nodes": 64}, options={"interval": steps}
                )
                for steps in (1, 4, 16)
            },
        },
    ),
    "branches": Study(
        "number and length of branches, and how they start",
        "Self-Draft, figures 5 and 6",
        {
            "stock": _STOCK,
            "none": _fixed(),
            **{
                f"{number} x {length}": Variant(
                    "selfspec-branches", {}, options={"num_branches": number, "length": length}
                )
                for number, length in ((2, 6), (6, 6), (10, 6), (6, 2), (6, 10))
            },
            "alone, as they start here": Variant("suffix-branches", {}),
            "alone, as in the paper": Variant("self-draft", {}),
        },
    ),
    "sources": Study(
        "what each source is worth: alone, and left out",
        "Self-Draft, figure 8, for all of ours",
        {
            "stock": _STOCK,
            "all": _fixed(),
            **{name: _fixed(sources=[name]) for name in SOURCE_NAMES},
            **{
                f"no {name}": _fixed(sources=[other for other in SOURCE_NAMES if other != name])
                for name in SOURCE_NAMES
            },
            "branches": Variant("selfspec-branches", {}),
            "longest match, else LUT": Variant("sam", {}),
        },
    ),
    "memories": Study(
        "what context and the texts of --cache are worth",
        "Self-Draft, figure 8",
        {
            "stock": _STOCK,
            "context, texts": Variant("selfspec-branches", {"sources": ["context", "answers"]}),
            "context": Variant("selfspec-branches", {"sources": ["context"]}),
            "answers": _fixed(sources=["answers"]),
        },
    ),
    "rules": Study(
        "a draft model's trees: whose turn it is, and when drafting ends; pass --assistant-model",
        "EdgeLLM, equations 1 to 3 and figure 12",
        {
            "stock": _STOCK,
            **{
                f"{order}, 8 nodes": _edgellm(8, order=order, rule="none")
                for order in ("chain", "best-first", "pacer")
            },
            **{
                f"threshold from {alpha:g}, times {factor:g}": _edgellm(
                    32, order="best-first", alpha=alpha, factor=factor
                )
                for alpha, factor in _THRESHOLDS
            },
            "as in the paper: pacer and threshold": _edgellm(32),
        },
    ),
    "widths": Study(
        "tokens a step by the width of the check",
        "Ghidorah, table I",
        {
            "stock": _STOCK,
            **{f"{width} nodes": _fixed(max_nodes=width) for width in _WIDTHS},
        },
    ),
    "fitted": Study(
        "one fitted shape, and trees that grow; pass --tree made by 'fit --width 64'",
        "Ghidorah, table I",
        {
            "stock": _STOCK,
            **{f"fitted, {n} nodes": Variant("ghidorah", {"max_nodes": n}) for n in _WIDTHS},
            **{f"fixed, {n} nodes": _fixed(max_nodes=n) for n in _WIDTHS},
        },
    ),
}
