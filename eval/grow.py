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
from typing import Any

import torch
from transformers import LlamaForCausalLM

from eval.models.grown import disturb, grow, num_parameters
from eval.models.loading import load_model, load_tokenizer
from eval.models.shapes import SHAPES, GrowError, named_shape

_CHECK_PROMPT = "The quick brown fox jumps over the lazy dog, and then it stops to ask why."


def run(options: argparse.Namespace) -> int:
    """Writes the new model, and says how far it is from the old one."""
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GrowError(f"--out must be a new or an empty folder (got {options.out!r})")
    if not options.noise >= 0:
        raise GrowError(f"--noise must be >= 0 (got {options.noise})")
    if options.shape is None and not options.noise:
        raise GrowError("--shape or --noise must be given (got neither): there is nothing to do")
    shape = None if options.shape is None else named_shape(options.shape)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    tokenizer = load_tokenizer(options.model)
    grown = copy.deepcopy(model) if shape is None else grow(model, shape, seed=options.seed)
    disturb(grown, options.noise, seed=options.seed)
    difference, largest = _logit_difference(model, grown, tokenizer)
    grown.save_pretrained(out)
    tokenizer.save_pretrained(out)
    inner = num_parameters(grown)
    print(f"parameters: {inner:,} and {grown.num_parameters() - inner:,} in embeddings")
    print(f"largest logit difference: {difference:.2g} of {largest:.3g}")
    return 0


@torch.no_grad()
def _logit_difference(
    model: LlamaForCausalLM, grown: LlamaForCausalLM, tokenizer: Any
) -> tuple[float, float]:
    """The largest difference between their logits, and the largest logit."""
    ids = tokenizer(_CHECK_PROMPT, return_tensors="pt").input_ids.to(model.device)
    before = model(ids).logits.float()
    after = grown(ids).logits.float()
    return (before - after).abs().max().item(), before.abs().max().item()


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="folder of the small Llama")
    add("--shape", help=", ".join(SHAPES))
    noise = "disturb all matrices of the layers by this share of their size; default: %(default)s"
    add("--noise", type=float, default=0.0, metavar="SHARE", help=noise)
    add("--out", required=True, metavar="FOLDER", help="new folder to write")
    add("--dtype", default="auto", help="float32, bfloat16, float16; auto: the model's own")
    add("--device", default="cpu", help="where to build it; default: cpu")
    add("--seed", type=int, default=0, help="of the random weights; default: 0")
