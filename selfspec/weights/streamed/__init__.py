"""Weights larger than memory: read from their files ahead of the forward, layer by layer.

Some decoder layers are resident. The others share two buffers, which a thread fills in the order in
which the forward needs the layers. After the last layer it goes on with the first ones, so that the
next forward's first layers are read while this step is verified and the next tree is drafted.
"""

from selfspec.weights.streamed.files import check_complete
from selfspec.weights.streamed.loading import load_within, may_have_copy
from selfspec.weights.streamed.stream import STREAMED, FileWeight, is_streamed

__all__ = [
    "STREAMED",
    "FileWeight",
    "check_complete",
    "is_streamed",
    "load_within",
    "may_have_copy",
]
