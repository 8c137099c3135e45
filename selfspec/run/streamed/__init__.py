"""Weights larger than memory: read from their files ahead of the forward, layer by layer.

Part of the decoder layers is resident. The others share a few buffers, which a thread fills in the
order in which the forward needs them. Behind the last layer it goes on with the first ones, so
that those of the next forward are read while a step is verified and the next draft is made.
"""

from selfspec.run.streamed.loading import check_complete, load_within
from selfspec.run.streamed.stream import Traffic, is_streamed, traffic

__all__ = ["Traffic", "check_complete", "is_streamed", "load_within", "traffic"]
