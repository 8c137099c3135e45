"""selfspec: the same text from `model.generate()`, in fewer forwards.

What needs torch is imported when it is first asked for, so that `selfspec --help` answers at once.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from selfspec.compat.versions import untried_reason
from selfspec.config import SpecConfig
from selfspec.errors import (
    AttachError,
    BuildError,
    CacheError,
    ConfigError,
    SelfSpecError,
    UnsupportedError,
    VocabularyError,
    WeightsError,
)
from selfspec.records import DraftTree, StepRecord
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from selfspec.batch import Answer, generate_many
    from selfspec.plugin import (
        LutRecorder,
        SelfSpec,
        SelfSpecCandidateGenerator,
        attach,
        detach,
        hub_folder,
        load,
    )

__all__ = [
    "Answer",
    "AttachError",
    "BuildError",
    "CacheError",
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
    "WeightsError",
    "attach",
    "detach",
    "generate_many",
    "hub_folder",
    "load",
]
__version__: str


class _Named(logging.Handler):
    """Says whose a warning is where a program has set up no logging, which prints bare words."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            print(f"selfspec: {self.format(record)}", file=sys.stderr)


logging.getLogger("selfspec").addHandler(_Named(logging.WARNING))


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml is where it is written
        return metadata.version("selfspec")
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")  # So that selfspec.cache.load_cache works.
    if name not in __all__:
        # Python suggests a name that is near to this one.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    room = "batch" if name in ("Answer", "generate_many") else "plugin"
    try:
        return getattr(import_module(f"{__name__}.{room}"), name)
    except ImportError as error:
        if reason := untried_reason(metadata.version("transformers")):
            raise ImportError(f"selfspec.{name} can't be imported: {reason}") from error
        raise


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
