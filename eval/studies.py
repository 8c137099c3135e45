"""The experiments of the papers that selfspec builds on, to be made on the model at hand.

A study is a run whose contestants are one method with different knobs, all interleaved; its
report has a row for each. What the papers measured was on their own models and machines, and is
theirs to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from eval.errors import EvalError
from selfspec.errors import unknown_name

__all__ = ["STUDIES", "Study", "Variant", "named_study"]

_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class Variant(NamedTuple):
    """A method, with knobs that are its own."""

    method: str
    knobs: Mapping[str, Any]


class Study(NamedTuple):
    """What is asked, after which experiment, and who takes part."""

    title: str
    after: str
    variants: Mapping[str, Variant]


def named_study(name: str) -> Study:
    """An unknown one is answered with the nearest."""
    if name not in STUDIES:
        raise EvalError(unknown_name("study", name, STUDIES))
    return STUDIES[name]


def _ours(**knobs: Any) -> Variant:
    return Variant("selfspec", knobs)


def _fixed(**knobs: Any) -> Variant:
    """Every tree takes all its nodes: it is their number that is compared."""
    return _ours(budget="fixed", **knobs)


_STOCK = Variant("stock", {})
_KEPT = 1 << 20  # steps: the first tree's shape is never given up

STUDIES: dict[str, Study] = {
    "tasks": Study(
        "goodput, latency and speed-up by task",
        "DIAA, tables 1 and 2; Self-Draft, table 2",
        {name: Variant(name, {}) for name in ("stock", "prompt-lookup", "lut-tree", "self-draft")}
        | {"selfspec": _ours()},
    ),
    "parts": Study(
        "what LUTs and dynamic trees are worth",
        "DIAA, table 3",
        {
            "stock": _STOCK,
            "all": _ours(),
            "no LUTs": _ours(sources=["context", "runners"]),
            "no dynamic tree": _ours(update_interval=_KEPT),
            "neither": _ours(sources=["context", "runners"], update_interval=_KEPT),
        },
    ),
    "shapes": Study(
        "nodes of a tree, and steps for which it keeps its shape",
        "DIAA, figure 8",
        {
            "stock": _STOCK,
            **{
                f"{nodes} nodes, {steps} steps": _fixed(max_nodes=nodes, update_interval=steps)
                for nodes, steps in product((8, 16, 32, 64), (1, 4, 16))
            },
        },
    ),
    "branches": Study(
        "number and length of branches",
        "Self-Draft, figures 4 to 8",
        {
            "stock": _STOCK,
            "none": _ours(),
            **{
                f"{number} x {length}": _ours(num_branches=number, branch_length=length)
                for number, length in ((2, 6), (6, 6), (10, 6), (6, 2), (6, 10))
            },
        },
    ),
    "memories": Study(
        "what context and corpus are worth; pass --cache, or there is no corpus",
        "Self-Draft, figures 4 to 8",
        {
            "stock": _STOCK,
            "context, corpus": _ours(num_branches=6, sources=["context", "corpus"]),
            "context": _ours(num_branches=6, sources=["context"]),
            "corpus": _ours(sources=["corpus"]),
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
}
