"""Train the embedded tiny model: a byte-level BPE and a small Llama, on Python's own library.

Writes an ordinary transformers folder with a model card made from the run's real numbers.
Knows nothing of selfspec. A killed run that is started again with the same options goes on from
its last checkpoint. Under a time limit two runs differ in their number of steps, so in weights.

    python -m eval.train_tiny --out FOLDER --minutes 60 --threads 2 --compile

On Linux half of a CPU's time can go into handing big buffers back and asking for them again;
MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000 in the environment keep them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from eval.models.tiny_corpus import CorpusError, build_corpus, stdlib_folder
from eval.models.tiny_model import MAX_POSITIONS, build_model
from eval.models.training import Options, OptionsError, Trainer, train, write_folder


def run(options: Options) -> None:
    """From sources to folder."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    corpus, tokenizer = build_corpus(
        options.sources or stdlib_folder(), options.checkpoint / "tokenizer.json", seed=options.seed
    )
    print(f"{corpus.num_files} files, {len(corpus.train_ids)} tokens", flush=True)
    model = build_model(tokenizer, seed=options.seed, device=options.device)
    trainer = Trainer(model, corpus, options)
    trainer.resume()
    train(trainer)
    write_folder(trainer, tokenizer)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train_tiny", description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--out", type=Path, required=True, help="folder for the model and its checkpoint")
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
    option("--save-every", type=int, default=Options.save_every, help="steps between checkpoints")
    option("--threads", type=int, help="CPU threads (default: torch's own choice)")
    option("--device", default=Options.device, help="cpu or cuda")
    option("--compile", action="store_true", help="torch.compile the forward; needs a compiler")
    return parser


def check(options: Options) -> None:
    """Refuse numbers that no run can use."""
    for name in ("steps", "minutes", "lr", "batch_tokens", "seq_len", "save_every", "threads"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise OptionsError(f"--{name.replace('_', '-')} must be > 0 (got {value})")
    if options.long_every < 0:
        raise OptionsError(f"--long-every must be >= 0 (got {options.long_every})")
    if not 2 <= options.seq_len <= MAX_POSITIONS:
        raise OptionsError(f"--seq-len must be 2 to {MAX_POSITIONS} (got {options.seq_len})")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: wrong options and useless sources are one line and exit status 2."""
    parser = build_parser()
    options = Options(**vars(parser.parse_args(arguments)))
    try:
        check(options)
        run(options)
    except (OptionsError, CorpusError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
