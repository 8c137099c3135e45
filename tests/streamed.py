"""Tiny models in folders, and their streamed selves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from selfspec import ConfigError, load
from tests.fakes import new_model

# Enough layers that two buffers are smaller than all of them.
_LAYERS = {"num_hidden_layers": 6}


def saved_model(folder: Path, name: str = "llama", *, shards: str = "1GB", **changes: Any) -> Any:
    """A random model of several layers, saved in files of at most that size."""
    model = new_model(name, **_LAYERS | changes)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def least_memory(folder: Path, **options: Any) -> str:
    """What the message names as the least that will do."""
    with pytest.raises(ConfigError) as caught:
        load(str(folder), max_memory=1, **options)
    return re.search(r"at least (\w+) for this model", str(caught.value))[1]


def load_tightly(folder: Path, **options: Any) -> Any:
    """The model with no more memory than it needs: all layers are streamed."""
    options = {"max_length": 1, **options}
    return load(str(folder), max_memory=least_memory(folder, **options), **options)
