"""What measuring commands do alike: how they sample, read knobs, and say what they ran on."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import selfspec
from eval.shapes import GrowError
from selfspec.errors import SelfSpecError

__all__ = ["exit_status", "machine", "one_line", "parsed_knobs", "quieten", "sampling", "versions"]


def exit_status(run: Callable[[], int]) -> int:
    """What a command ends with: 2, and one line, where it can't be run as asked."""
    try:
        return run()
    except (GrowError, OSError, SelfSpecError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def quieten() -> None:
    """Keeps transformers' log and progress bars out of the figures."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def sampling(temperature: float) -> dict[str, Any]:
    """Arguments of `generate()`; 0 is greedy."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0}


def one_line(error: Exception) -> str:
    """An error for a row or a line of output."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def parsed_knobs(knobs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs; values are JSON where they parse as such."""
    parsed: dict[str, Any] = {}
    for knob in knobs:
        name, _, value = knob.partition("=")
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed


def versions() -> dict[str, str]:
    """Of all that a figure depends on."""
    return {
        "selfspec": selfspec.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def machine(device: str) -> str:
    """The name of the GPU or processor that runs the model."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
