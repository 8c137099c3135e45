"""What a figure depends on besides what was asked: versions, device, state of the code."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import eval as evaluation
import selfspec
from eval.errors import EvalError
from selfspec.machine.device import device_name

_PLACES = ("model", "draft_model", "cache", "remember")  # options that may name a file or a folder
# More questions or rounds make no other run. Whoever changed the code chooses another --output.
_MAY_DIFFER = frozenset(["limit", "rounds", "git_commit", "git_dirty"])


def environment(model: Any) -> dict[str, Any]:
    """Of this process, with its model on its device."""
    return {**where(model), **_git(), "num_parameters": model.num_parameters()}


def where(model: Any) -> dict[str, Any]:
    """What runs the model, and by which code."""
    return {
        **versions(),
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "machine": device_name(model.device),
        "threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    """Of all that a figure depends on."""
    return {
        "selfspec": selfspec.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def tell(bench: str, options: argparse.Namespace, **found: Any) -> int:
    """Prints the last line of a command: what was asked, by which versions, and what was found.

    Returns the exit status of a command that ends well.
    """
    asked = dict(vars(options))
    for name, value in vars(options).items():
        if isinstance(value, list) and name in _PLACES:
            asked[name] = list(map(short_name, value))
        elif isinstance(value, Path) or name in _PLACES:
            asked[name] = value and short_name(str(value))
    if "knob" in asked:
        asked["knobs"] = asked.pop("knob")
    print(json.dumps({"bench": bench, **asked, **versions(), **found}))
    return 0


def short_name(name: str | None) -> str | None:
    """A Hub id as it is; of a path the last part, wherever it lies."""
    path = Path(name or "").expanduser()  # Of a cache the ending may be missing.
    if name is None or not (path.exists() or Path(f"{path}.safetensors").exists()):
        return name
    return path.resolve().name


def check_same(folder: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with a run that was measured otherwise; names the first difference."""
    for part in ("settings", "environment"):
        for name in {**known[part], **now[part]}:
            was, is_now = known[part].get(name), now[part].get(name)
            if was != is_now and name not in _MAY_DIFFER:
                raise EvalError(
                    f"{name} must be what it was when the run in {folder} began: {was!r} (got "
                    f"{is_now!r}); choose another --output, or go back to {was!r}"
                )


def _git() -> dict[str, Any]:
    """The commit that the code stands at, where it lies in a clone."""
    return {
        "git_commit": _asked_git("rev-parse", "HEAD"),
        "git_dirty": bool(_asked_git("status", "--porcelain")),
    }


def _asked_git(*arguments: str) -> str | None:
    folder = Path(evaluation.__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
