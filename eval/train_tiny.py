"""Train the embedded tiny model: a byte-level BPE and a small Llama, on Python's own library.

Writes an ordinary transformers folder with a model card made from the run's real numbers. Under a
time limit two runs differ in their number of steps, so in weights.

    python -m eval train_tiny --out FOLDER --minutes 60 --threads 2 --compile

On Linux half of a CPU's time can go into handing big buffers back and asking for them again;
MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000 in the environment keep them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from eval.errors import EvalError
from eval.models.tiny_corpus import build_corpus, stdlib_folder
from eval.models.tiny_model import MAX_POSITIONS, build_model
from eval.models.training import Options, Trainer, train, write_folder
from eval.options import check_at_least


def run(asked: argparse.Namespace) -> int:
    """From sources to folder."""
    options = Options(**vars(asked))
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    corpus, tokenizer = build_corpus(options.sources or stdlib_folder(), seed=options.seed)
    print(f"{corpus.num_files} files, {len(corpus.train_ids)} tokens", flush=True)
    model = build_model(tokenizer, seed=options.seed, device=options.device)
    trainer = Trainer(model, corpus, options)
    train(trainer)
    write_folder(trainer, tokenizer)
    return 0


def _check(options: Options) -> None:
    """Refuses numbers that no run can use."""
    check_at_least(options, 1, "steps", "batch_tokens", "validate_every", "threads")
    check_at_least(options, 0, "long_every")
    for name in ("minutes", "lr"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise EvalError(f"--{name} must be > 0 (got {value})")
    if not 2 <= options.seq_len <= MAX_POSITIONS:
        raise EvalError(f"--seq-len must be 2 to {MAX_POSITIONS} (got {options.seq_len})")


def add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--out", type=Path, required=True, help="folder for the model")
    option("--sources", type=Path, help="folder of .py files (default: the standard library)")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="how many steps to train")
    budget.add_argument("--minutes", type=float, help="how long to train")
    option("--seed", type=int, default=Options.seed, help="of split and weights")
    option("--lr", type=float, default=Options.lr, help="highest learning rate")
    option("--batch-tokens", type=int, default=Options.batch_tokens, help="tokens in a batch")
    option("--seq-len", type=int, default=Options.seq_len, help="tokens in a window")
    option(
        "--long-every",
        type=int,
        default=Options.long_every,
        help="which batches have windows of full length, 0 for none",
    )
    option("--validate-every", type=int, default=Options.validate_every, help="steps between looks")
    option("--threads", type=int, help="CPU threads (default: torch's own choice)")
    option("--device", default=Options.device, help="cpu or cuda")
    option("--compile", action="store_true", help="torch.compile the forward; needs a compiler")
