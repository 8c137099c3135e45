"""The outermost ring: everything that touches transformers' `generate()`."""

from selfspec.plugin.attach import attach, detach, hub_folder
from selfspec.plugin.candidates import LutRecorder, SelfSpecCandidateGenerator
from selfspec.plugin.loading import load
from selfspec.plugin.spec import SelfSpec

__all__ = [
    "LutRecorder",
    "SelfSpec",
    "SelfSpecCandidateGenerator",
    "attach",
    "detach",
    "hub_folder",
    "load",
]
