"""Faster linear layers on a CPU, computed from second copies of their weights.

A math library reorders a matrix before each multiplication. *Packed* weights are already in that
order. A CPU that can't calculate in half precision also multiplies one token after the other; from
a float16 copy that is made for it, several tokens cost about as much as one. Weights in 8 bits are
packed too, and are there instead of a model's own.
"""

from selfspec.weights.eight_bits import (
    eight_bit_bytes,
    is_in_eight_bits,
    missing_for_eight_bits,
    to_eight_bits,
)
from selfspec.weights.packing import (
    InPlacePacking,
    Packing,
    is_packed_in_place,
    own_memory,
    pack_loaded,
)
from selfspec.weights.step_attention import EXACT_ATTENTION

__all__ = [
    "EXACT_ATTENTION",
    "InPlacePacking",
    "Packing",
    "eight_bit_bytes",
    "is_in_eight_bits",
    "is_packed_in_place",
    "missing_for_eight_bits",
    "own_memory",
    "pack_loaded",
    "to_eight_bits",
]
