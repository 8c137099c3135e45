"""The names of the methods, in a line what each one is, and who goes first.

Imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

STOCK = "stock"  # All others are compared with it.
FORWARD_ONLY = "forward-only"
OURS = "selfspec"

DESCRIPTIONS = {
    STOCK: "generate() of transformers as it is",
    "stock-float32": "the same on a float32 copy of the model",
    "stock-padded": "the same, each prompt beside a longer one: what its own rounding changes",
    "stock-static": "the same with a static KV cache, compiled",
    "prompt-lookup": "transformers' own drafts from the prompt",
    "assisted": "transformers' own drafts from --assistant-model",
    "lut-static": "after Token Recycling: one LUT, and a tree of 80 nodes that keeps its shape",
    "diaa": "SelfSpec.as_in('diaa'): recorded probabilities, decays 0.8 and 0.7, threshold 0.005",
    "diaa-merging": "DIAA read otherwise: only a node's first choice may replace an entry",
    "lut-tree": "DIAA with coarse probabilities and no threshold",
    "self-draft": "SelfSpec.as_in('self-draft'): branches of random tokens, n-grams and a corpus",
    "suffix-branches": "Self-Draft with our context: suffix matching beside n-grams",
    "edgellm": "SelfSpec.as_in('edgellm'): branch pacer and threshold, with --assistant-model",
    "ghidorah": "SelfSpec.as_in('ghidorah'): our drafts in the tree of --tree",
    "selfspec-branches": "selfspec with Self-Draft's branches beside its trees",
    "selfspec-intervals": "selfspec with trees that keep their shape for some steps",
    "switch": "after SAM decoding: the longest match where it is long enough, else a LUT tree",
    FORWARD_ONLY: "selfspec with its drafts switched off: its way to run a forward alone",
    OURS: "all sources, weighed by what came true",
}


def rotated(methods: Sequence[T], number: int) -> list[T]:
    """The methods in the order of a round: each one goes first in turn.

    >>> rotated(["stock", "ours", "other"], 4)
    ['ours', 'other', 'stock']
    """
    first = number % len(methods)
    return [*methods[first:], *methods[:first]]
