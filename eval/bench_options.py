"""What `eval.bench_step` can be told, and what of it belongs to a row."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.grow import DTYPES
from eval.methods import METHODS
from eval.prompts import add_model_options, add_prompt_options
from eval.setup import machine, versions
from selfspec.config import BUDGETS

__all__ = ["parse", "settings"]

_TEMPERATURES = {"questions": 0.0, "random": 1.5}  # by kind of text, where none is given
_METHODS = ["stock", "prompt-lookup", "selfspec"]


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The options; ends the process with a usage line where they are none."""
    parser = argparse.ArgumentParser(prog="python -m eval.bench_step", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_prompt_options(parser.add_argument_group("what is answered").add_argument)
    _add_model_options(parser.add_argument_group("which model").add_argument)
    _add_method_options(parser.add_argument_group("who answers").add_argument)
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep rows; go on with its own")
    options = parser.parse_args(argv)
    if options.temperature is None:
        options.temperature = _TEMPERATURES[options.text]
    return options


def settings(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """All that figures depend on, but for how many prompts there are."""
    return {
        "bench": "bench_step",
        "model": Path(options.model).name,
        **_plain(options),
        "machine": machine(options.device),
        "num_cpus": os.cpu_count(),
        "knobs": options.knob,
        "cache": None if options.cache is None else Path(options.cache).name,
        "assistant": None if options.assistant is None else Path(options.assistant).name,
        "questions": None if options.questions is None else _digest(options.questions),
        "attention": model.config._attn_implementation,
        **versions(),
    }


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    """The options that are called alike in a row."""
    names = "shape dtype device threads methods max_nodes budget temperature max_new_tokens seed"
    return {name: getattr(options, name) for name in f"{names} text task every offset".split()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _add_prompt_options(option: Any) -> None:
    add_prompt_options(option)
    warmth = "0: greedy; default: 0, for random texts 1.5"
    option("--temperature", type=float, metavar="T", help=warmth)


def _add_model_options(option: Any) -> None:
    add_model_options(option)
    option("--dtype", choices=DTYPES, default="float32", help="default: float32")
    threads = os.cpu_count() or 1
    option("--threads", type=int, default=threads, metavar="N", help="of a CPU; default: all")


def _add_method_options(option: Any) -> None:
    names = f"of {', '.join(METHODS)}; default: {' '.join(_METHODS)}"
    option("--methods", nargs="+", default=_METHODS, metavar="NAME", help=names)
    option("--assistant", metavar="PATH", help="the small model of the method 'assisted'")
    width = "nodes of selfspec's trees; default: 16"
    option("--max-nodes", type=int, default=16, metavar="N", help=width)
    option("--budget", choices=BUDGETS, default="fixed", help="all of them, or what pays here")
    option("--knob", nargs="*", default=[], metavar="NAME=VALUE", help="other knobs of SpecConfig")
    cache = "cache folder or Hub id to start with; default: none, cold"
    option("--cache", metavar="PATH", help=cache)
