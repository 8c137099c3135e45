"""What the papers report of their own experiments, to stand beside a study's rows.

Figures are the papers'; their models, devices and answers are others than those of any run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Reported(NamedTuple):
    """A column of a paper's figures by variant, and what they are of."""

    head: str
    note: str
    figures: Mapping[str, str]


# Tokens a step by the width of the check: Ghidorah's table I, MT-bench.
TOKENS_BY_WIDTH = {1: 1.0, 2: 1.72, 4: 2.28, 8: 2.59, 16: 2.93, 32: 3.19, 64: 3.34}
_GHIDORAH = Reported(
    "Ghidorah",
    "Ghidorah, table I: tokens a step on MT-bench, drafted by Medusa's trained heads; at 64 nodes "
    "3.56 on GSM8K, 3.74 on MBPP and 3.71 on HumanEval. Heads that were trained know from the "
    "first token on what tables have to learn.",
    {},
)

REPORTED: dict[str, Reported] = {
    "tasks": Reported(
        "paper, 3B / 7B / 1B",
        "DIAA, table 2: speed-up over plain decoding on an NVIDIA Jetson Orin Nano Super, with 512 "
        "new tokens on Spec-Bench, of Llama-3.2-3B, Vicuna-7B (both INT4) and Llama-3.2-1B. "
        "Self-Draft, table 2: tokens a forward of Llama-7B on an A100, from MT-bench to HumanEval. "
        "Another model on another device: only the order of the methods can be compared.",
        {
            "stock": "1 / 1 / 1",
            "draft model": "1.28 / 1.14 / 0.94",
            "SAM-Decoding": "1.91 / 1.76 / 1.87",
            "Token Recycling": "2.08 / 1.31 / 1.83",
            "DIAA": "2.22 / 1.78 / 2.05",
            "Self-Draft": "2.01 to 3.22 tokens",
        },
    ),
    "parts": Reported(
        "DIAA, goodput",
        "DIAA, table 3: the mean of six tasks against all of DIAA, on the same Jetson. Without "
        "overlap it is -8 %; nothing overlaps in selfspec.",
        {
            "no LUTs": "-11 %",
            "DIAA": "0",
            "LUT, static tree": "-15 %",
            "neither": "-17 %",
        },
    ),
    "tables": Reported(
        "DIAA, both tables",
        "DIAA, table 4: int64 and float32, eight candidates, for vocabularies of 128,256 and "
        "32,000 tokens. Ours are int32 and float16, and the second-order table comes on top.",
        {"top 8": "11.7 MB / 2.9 MB"},
    ),
    "widths": _GHIDORAH._replace(
        figures={f"{n} nodes": f"{each}" for n, each in TOKENS_BY_WIDTH.items() if n > 1}
    ),
    "fitted": _GHIDORAH._replace(
        figures={f"fitted, {n} nodes": f"{each}" for n, each in TOKENS_BY_WIDTH.items() if n > 1}
    ),
    "branches": Reported(
        "Self-Draft",
        "Self-Draft, table 2: tokens a forward on MT-bench, Llama-7B on an A100, with a corpus. "
        "Figures 5 and 6 are curves, whose values can't be read here.",
        {"alone, as in the paper": "2.01"},
    ),
}
