"""Grow a small Llama into the shape of a big one, or disturb it, and save it.

    python -m eval grow --model PATH --shape 1b --out FOLDER
    python -m eval grow --model PATH --noise 0.05 --out FOLDER

The grown model computes what the small one does, at the big one's cost; `eval.models.grown` says
how. With --noise it writes another text instead, as a draft model of the same family does: each
matrix gets random numbers, --noise times as large as its own. What is printed last is how far the
logits of a sentence moved.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eval.models.grown import disturb, fit, grow, num_parameters
from eval.models.loading import DTYPES
from eval.models.shapes import SHAPES, GrowError, known, named_shape

_CHECK_PROMPT = "The quick brown fox jumps over the lazy dog, and then it stops to ask why."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="PATH", help="folder of the small Llama")
    names = ", ".join(SHAPES)
    shape = f"{names}; 135m:49152: with so many tokens, 135m:full: with as many as its model has"
    parser.add_argument("--shape", help=shape)
    noise = "disturb all matrices of the layers by this share of their size; default: %(default)s"
    parser.add_argument("--noise", type=float, default=0.0, metavar="SHARE", help=noise)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new folder to write")
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES)}; default: the model's own")
    parser.add_argument("--device", default="cpu", help="where to build it; default: cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights; default: 0")


def _check_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without
        raise GrowError(f"device must be one that torch finds here (got {name!r})") from error


def _read_config(path: Path) -> LlamaConfig:
    if not (path / "config.json").is_file():
        raise GrowError(f"model must be a folder with a config.json (got {str(path)!r})")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if config.model_type != "llama":
        raise GrowError(f"model must be a llama (got a {config.model_type} in {str(path)!r})")
    return config


def _load(path: Path, dtype: torch.dtype | None, device: torch.device) -> LlamaForCausalLM:
    """The source, already in the dtype that the grown one is compared with it in."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    return model.to(device).eval()


@torch.no_grad()
def _logit_difference(
    model: LlamaForCausalLM, grown: LlamaForCausalLM, input_ids: Tensor
) -> tuple[float, float]:
    """The largest logit difference over the source's vocabulary, and the largest logit."""
    before = model(input_ids.to(model.device)).logits.float()
    after = grown(input_ids.to(grown.device)).logits[..., : before.shape[-1]].float()
    return (before - after.to(before.device)).abs().max().item(), before.abs().max().item()


def run(options: argparse.Namespace) -> int:
    path, out = Path(options.model), Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GrowError(f"out must be a new or an empty folder (got {options.out!r})")
    dtype = DTYPES[known("dtype", options.dtype, DTYPES)] if options.dtype else None
    device = _check_device(options.device)
    if not options.noise >= 0:
        raise GrowError(f"noise must be >= 0 (got {options.noise})")
    if options.shape is None and not options.noise:
        raise GrowError("shape or noise must be given (got neither): there is nothing to do")
    if options.shape is not None:
        named_shape(options.shape)  # A wrong name is refused before the folder is looked at.
        fit(_read_config(path), options.shape)  # Misfits are refused before weights are read.
    model = _load(path, dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    grown = copy.deepcopy(model)
    if options.shape is not None:
        grown = grow(model, options.shape, seed=options.seed)
    disturb(grown, options.noise, seed=options.seed)
    input_ids = tokenizer(_CHECK_PROMPT, return_tensors="pt").input_ids
    difference, largest = _logit_difference(model, grown, input_ids)
    grown.save_pretrained(out)
    tokenizer.save_pretrained(out)
    inner = num_parameters(grown)
    print(f"parameters: {inner:,} and {grown.num_parameters() - inner:,} in embeddings")
    print(f"largest logit difference: {difference:.2g} of {largest:.3g}")
    return 0
