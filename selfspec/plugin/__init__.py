"""The outermost ring: everything that touches transformers' `generate()`."""

from selfspec.plugin.attach import attach, detach, hub_folder
from selfspec.plugin.loading import load
from selfspec.plugin.spec import SelfSpec
from selfspec.plugin.stock import LutRecorder, SelfSpecCandidateGenerator

__all__ = [
    "LutRecorder",
    "SelfSpec",
    "SelfSpecCandidateGenerator",
    "attach",
    "detach",
    "hub_folder",
    "load",
]
