"""What a figure depends on besides what was asked: versions, hashes, device, state of the code."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import eval as evaluation
import selfspec
from eval.errors import EvalError
from selfspec.cache import locate, tokenizer_info
from selfspec.machine.hardware import device_name

_PLACES = ("model", "draft_model", "cache", "remember")  # options that may name a file or a folder
_SAMPLE = 64  # values of each weight that go into the hash
# More questions or rounds, and a commit that changes no code, make no other run.
_MAY_DIFFER = frozenset(["limit", "rounds", "git_commit", "git_dirty"])


def environment(
    model: Any, tokenizer: Any, cache: str | None, compared: Sequence[str] = ()
) -> dict[str, Any]:
    """Of this process, with its model on its device; `compared` are a study's caches."""
    return {
        **where(model),
        **_git(),
        "source_sha256": _source_sha256(),
        "model_sha256": _model_sha256(model),
        "num_parameters": model.num_parameters(),
        "tokenizer_sha256": tokenizer_info(tokenizer).fingerprint,
        "cache_sha256": None if cache is None else _cache_sha256(cache),
        "compared_sha256": {short_name(each): _cache_sha256(each) for each in compared},
    }


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


def told(bench: str, options: argparse.Namespace, **found: Any) -> dict[str, Any]:
    """The last line of a command: what was asked, by which versions, and what was found."""
    asked = dict(vars(options))
    for name, value in vars(options).items():
        if isinstance(value, Path) or name in _PLACES:
            asked[name] = value and short_name(str(value))
    if "knob" in asked:
        asked["knobs"] = asked.pop("knob")
    return {"bench": bench, **asked, **versions(), **found}


def short_name(name: str | None) -> str | None:
    """A Hub id as it is; of a path the last part, wherever it lies."""
    path = Path(name or "").expanduser()  # Of a cache the ending may be missing.
    if name is None or not (path.exists() or Path(f"{path}.safetensors").exists()):
        return name
    return path.resolve().name


def check_same(folder: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with a run that was measured otherwise; names the first difference.

    With batches the limit must stay too: it decides who is in a batch with whom.
    """
    free = _MAY_DIFFER - ({"limit"} if now["settings"]["batch_size"] > 1 else set())
    for part in ("settings", "environment"):
        for name in {**known[part], **now[part]}:
            was, is_now = known[part].get(name), now[part].get(name)
            if was != is_now and name not in free:
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


def _source_sha256() -> str:
    """Of all our Python files, the evaluation's too."""
    digest = hashlib.sha256()
    for package in (selfspec, evaluation):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _model_sha256(model: Any) -> str:
    """Of its config and the first values of every weight: enough to tell checkpoints apart."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in sorted(model.named_parameters()):
        values = weight.detach().reshape(-1)[:_SAMPLE].to("cpu", torch.float32)
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()


def _cache_sha256(name: str) -> str:
    return hashlib.sha256(locate(name).read_bytes()).hexdigest()
