"""What a report of a fault needs: versions, the machine, its fast operations, and the drafts."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from selfspec.cli.shared.writer import Writer

if TYPE_CHECKING:
    from selfspec.plugin import SelfSpec


def facts(writer: Writer, spec: SelfSpec) -> dict[str, str]:
    """All of them by name. `spec` must have answered something, which shows if drafts are on."""
    import torch

    from selfspec import __version__
    from selfspec.machine.hardware import device_name
    from selfspec.machine.memory import free_memory

    device = writer.model.device
    return {
        "selfspec": (
            f"{__version__}, transformers {version('transformers')}, torch {torch.__version__}, "
            f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
        ),
        "model": f"{writer.loaded}, {type(writer.model).__name__}, {writer}",
        "machine": (
            f"{device_name(device)}, threads: {torch.get_num_threads()}, "
            f"{free_memory(device) / 1e9:.0f} GB free"
        ),
        "packed weights": _packed_weights() if device.type == "cpu" else "on a CPU only",
        "drafts": drafts(writer, spec),
    }


def drafts(writer: Writer, spec: SelfSpec) -> str:
    """Whether drafts are on, and if not, why."""
    reason = spec.stats.disabled_reason
    mode = spec.ability(writer.model).mode
    if reason is None:
        return f"on, as {mode}s"
    return f"{'off' if mode == 'plain' else f'as {mode}s'}: {reason}"


def _packed_weights() -> str:
    """Which of the libraries that can pack weights this torch still has, and finds right here."""
    import torch

    from selfspec.machine.hardware import calculates_in
    from selfspec.run.packed.copies import ways_for

    half = ways_for(torch.bfloat16)
    whole = ways_for(torch.float32)
    found = {
        "oneDNN": bool(whole),
        "oneDNN in bfloat16": "same" in half,
        "FBGEMM": "float16" in half,
    }
    parts = [f"{name} {'yes' if has else 'no'}" for name, has in found.items()]
    own = "calculates" if calculates_in(torch.bfloat16) else "does not calculate"
    return f"{', '.join(parts)}; this CPU {own} in bfloat16"
