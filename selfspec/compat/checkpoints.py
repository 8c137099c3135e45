"""How transformers names the weights of a checkpoint, for models that are read in parts.

`from_pretrained()` has no public form that tells names without loading weights. Imported only when
a model is streamed; if a name is gone, the import fails with it, and nothing is loaded wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

__all__ = [
    "Chunk",
    "Concatenate",
    "MergeModulelist",
    "WeightConverter",
    "WeightRenaming",
    "dot_natural_key",
    "find_file",
    "get_model_conversion_mapping",
    "names_in_float32",
    "rename_source_key",
]


def find_file(name: str, file: str) -> Path | None:
    """A file of a folder, or of a repository on the Hub; None if it has no such file."""
    if Path(name).is_dir():
        path = Path(name, file)
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file))
    except (EntryNotFoundError, HFValidationError):
        return None


def names_in_float32(model: Any) -> list[str]:
    """Parts of the names of weights that keep float32 whatever dtype a model is loaded in."""
    return list(model._get_dtype_plan(model.dtype))
