"""How the weights of a model are held: packed for faster products on a CPU, rounded, or streamed.

A math library reorders a matrix before each multiplication. *Packed* weights are already in that
order. A CPU that can't calculate in half precision also multiplies one token after the other; from
weights that are packed in float16, several tokens cost about as much as one.
"""
