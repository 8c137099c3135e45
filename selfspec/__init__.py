"""selfspec: the same text from `model.generate()`, in fewer forwards."""

from selfspec.config import SpecConfig
from selfspec.errors import (
    AttachError,
    ConfigError,
    SelfSpecError,
    UnsupportedError,
    VocabularyError,
)
from selfspec.plugin import (
    LutRecorder,
    SelfSpec,
    SelfSpecCandidateGenerator,
    attach,
    detach,
    hub_folder,
)
from selfspec.records import DraftTree, GenerationStats, StepRecord

__all__ = [
    "AttachError",
    "ConfigError",
    "DraftTree",
    "GenerationStats",
    "LutRecorder",
    "SelfSpec",
    "SelfSpecCandidateGenerator",
    "SelfSpecError",
    "SpecConfig",
    "StepRecord",
    "UnsupportedError",
    "VocabularyError",
    "attach",
    "detach",
    "hub_folder",
]
__version__ = "0.1.0"
