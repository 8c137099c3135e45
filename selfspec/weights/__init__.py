"""How the weights of a model are held: packed for faster products on a CPU, in 8 bits, or streamed.

A math library reorders a matrix before each multiplication. *Packed* weights are already in that
order. A CPU that can't calculate in half precision also multiplies one token after the other; from
weights that are packed in float16, several tokens cost about as much as one.
"""

from selfspec.weights.eight_bits import (
    is_in_eight_bits,
    missing_for_eight_bits,
    to_eight_bits,
    weight_bytes,
)
from selfspec.weights.held_weight import PackedWeight, gives_rows, is_packed_in_place
from selfspec.weights.packing import linears_of, may_be_packed, pack, pack_loaded, unpack

__all__ = [
    "PackedWeight",
    "gives_rows",
    "is_in_eight_bits",
    "is_packed_in_place",
    "linears_of",
    "may_be_packed",
    "missing_for_eight_bits",
    "pack",
    "pack_loaded",
    "to_eight_bits",
    "unpack",
    "weight_bytes",
]
