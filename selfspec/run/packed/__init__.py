"""Faster linear layers on a CPU, over second copies of their weights.

A math library sorts a matrix into an order of its own before it multiplies. Weights that lie in
that order already, *packed*, spare it the sorting. And a CPU that can't calculate in half precision
multiplies one token after the other; over a float32 copy it takes several for the price of one.
"""

from selfspec.run.packed.weights import PackedWeights

__all__ = ["PackedWeights"]
