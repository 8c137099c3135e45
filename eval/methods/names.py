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

# Ways of selfspec's own, which show what its parts bring. A report compares it with all others.
PARTS_OF_OURS = (FORWARD_ONLY, "selfspec-branches", "selfspec-intervals")

DESCRIPTIONS = {
    STOCK: "generate() of transformers as it is",
    "stock-float32": "the same on a float32 copy of the model",
    "stock-padded": "the same, each prompt beside a longer one: what its own rounding changes",
    "stock-static": "the same with a static KV cache, compiled",
    "prompt-lookup": "transformers' own drafts from the prompt (Prompt Lookup Decoding, 2023)",
    "assisted": "transformers' own drafts from --assistant-model (Leviathan et al., 2023)",
    "mtp": "transformers' own drafts from the model's heads, use_mtp=True",
    "openvino": "OpenVINO in an environment of its own, with --openvino PYTHON EXPORTED",
    "token-recycling": "Token Recycling (2024): one LUT, a tree of 80 nodes that keeps its shape",
    "sam": "SAM decoding (2024): the longest match where it is long enough, else a LUT's tree",
    "suffix": "SuffixDecoding (2024): the memory of texts, of this request and of earlier ones",
    "rest": "REST (2023): drafts from the texts of --datastore alone",
    "lookahead": "Lookahead decoding (ICML 2024): a window of guesses, n-grams of the answers",
    "diaa": "DIAA (AAAI 2026): as_in('diaa'), recorded probabilities and decays",
    "lut-tree": "DIAA with coarse probabilities and no threshold",
    "self-draft": "Self-Draft (AAAI 2025): as_in('self-draft'), branches and n-grams",
    "suffix-branches": "Self-Draft with our context: suffix matching beside n-grams",
    "edgellm": "EdgeLLM (TMC 2025): as_in('edgellm'), with --assistant-model",
    "ghidorah": "Ghidorah (2025): as_in('ghidorah'), our drafts in the tree of --tree",
    "selfspec-branches": "selfspec with Self-Draft's branches beside its trees",
    "selfspec-intervals": "selfspec with trees that keep their shape for some steps",
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
