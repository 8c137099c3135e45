"""What every measuring command does alike: how it samples, and what it says it ran on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import transformers

import selfspec

__all__ = ["machine", "quieten", "sampling", "versions"]


def quieten() -> None:
    """Keeps transformers' log and progress bars out of the figures."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def sampling(temperature: float) -> dict[str, Any]:
    """Arguments of `generate()`; 0 is greedy."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0}


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
