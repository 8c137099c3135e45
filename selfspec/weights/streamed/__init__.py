"""Weights larger than memory: read from their files ahead of the forward, layer by layer.

Some decoder layers are resident. The others share two buffers, which a thread fills in the order in
which the forward needs the layers. After the last layer it goes on with the first ones, so that the
next forward's first layers are read while this step is verified and the next tree is drafted.
"""
