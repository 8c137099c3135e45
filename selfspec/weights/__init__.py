"""How the weights of a model are held: packed for faster products on a CPU, rounded, or streamed.

A math library reorders a matrix before each multiplication. *Packed* weights are already in that
order. A CPU that can't calculate in half precision also multiplies one token after the other; from
weights that are packed in float16, several tokens cost about as much as one.
"""

from selfspec.weights.held_weight import PackedWeight
from selfspec.weights.packing import (
    is_packed_in_place,
    linears_of,
    may_be_packed,
    pack,
    pack_loaded,
    unpack,
)
from selfspec.weights.rounded import BITS, rounding_reason
from selfspec.weights.rounded_model import round_model, rounded_bits, weight_bytes

__all__ = [
    "BITS",
    "PackedWeight",
    "is_packed_in_place",
    "linears_of",
    "may_be_packed",
    "pack",
    "pack_loaded",
    "round_model",
    "rounded_bits",
    "rounding_reason",
    "unpack",
    "weight_bytes",
]
