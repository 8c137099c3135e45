"""What a model's forwards took so far in its linear layers, told by what each product takes.

Packing pays as soon as it would have saved as much as it takes, the forward at hand included. So
nothing ever loses more than packing takes, however short the use of a model turns out to be. Knows
numbers; not layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.run.packed.trials import seconds_for

__all__ = ["Products", "Work"]

# Tokens that a step of this many nodes brings, cold, on real text: what a wider step is worth.
_TOKENS = {1: 1.0, 4: 1.35, 16: 1.8}


class Products(NamedTuple):
    """Seconds of a forward's products by the number of tokens: of all layers, and of the head.

    The head is asked about a prompt's last token alone.
    """

    layers: Mapping[int, float]
    head: Mapping[int, float]

    def of_prompt(self, num_tokens: int, num_rows: int) -> float:
        """The seconds of a forward over prompts of this many tokens in all."""
        return seconds_for(self.layers, num_tokens) + seconds_for(self.head, num_rows)

    def of_token(self, num_rows: int, max_nodes: int) -> float:
        """The seconds for one more token in each row, at the width that suits these products."""
        return min(
            (seconds_for(self.layers, n) + seconds_for(self.head, n)) / tokens
            for n, tokens in ((num_rows * width, t) for width, t in _TOKENS.items())
            if n <= max(num_rows, num_rows * max_nodes)
        )


@dataclass
class Work:
    """The forwards that a model was asked for."""

    prompts: Counter[int] = field(default_factory=Counter)  # tokens of prompts, by rows
    steps: Counter[tuple[int, int]] = field(default_factory=Counter)  # by rows and nodes

    def seconds(self, products: Products) -> float:
        """What the products of all these forwards took, or would have taken."""
        read = sum(products.of_prompt(tokens, rows) for rows, tokens in self.prompts.items())
        return read + sum(n * products.of_token(*step) for step, n in self.steps.items())
