"""The training of the embedded model: budget, steps, and the folder at the end."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from eval.models import tiny_card
from eval.models.tiny_corpus import Corpus, all_windows, windows
from eval.models.tiny_model import MAX_POSITIONS, MasterAdamW, wrap_tokenizer

WARM_UP = 0.02  # of the budget


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line. Of `steps` and `minutes` exactly one is given."""

    out: Path
    sources: Path | None = None
    steps: int | None = None
    minutes: float | None = None
    seed: int = 0
    lr: float = 2e-3
    batch_tokens: int = 2048
    seq_len: int = 512
    long_every: int = 8
    validate_every: int = 250
    threads: int | None = None
    device: str = "cpu"
    compile: bool = False


@dataclass
class Ledger:
    """What the run has spent, and how its last steps went."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def record(self, loss: float, tokens: int) -> None:
        self.step += 1
        self.tokens += tokens
        self.losses = [*self.losses[-99:], loss]


def progress(options: Options, ledger: Ledger) -> float:
    """The share of the budget that is spent, 0 to 1."""
    if options.steps is not None:
        return min(1.0, ledger.step / options.steps)
    return min(1.0, ledger.seconds / (60 * (options.minutes or math.inf)))


def rate_factor(spent: float) -> float:
    """Warm-up, then a cosine that reaches zero where the budget ends."""
    if spent < WARM_UP:
        return spent / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (spent - WARM_UP) / (1 - WARM_UP)))


def next_length(options: Options, step: int) -> int:
    """Every so often a batch of full length, so that the far positions are trained as well."""
    is_long = options.long_every and step % options.long_every == options.long_every - 1
    return MAX_POSITIONS if is_long else options.seq_len


class Trainer:
    """Owns the weights, the optimizer and the ledger; knows neither files' names nor text."""

    def __init__(self, model: LlamaForCausalLM, corpus: Corpus, options: Options) -> None:
        self.model, self.corpus, self.options = model, corpus, options
        self.forward: Callable[..., Any] = model
        if options.compile:
            self.forward = torch.compile(model, dynamic=False)
        self.optimizer = MasterAdamW(model.parameters(), lr=options.lr)
        self.ledger = Ledger()

    def loss(self, forward: Callable[..., Any], rows: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(rows).to(self.options.device)  # (B, L)
        loss: torch.Tensor = forward(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    def step(self) -> None:
        length = next_length(self.options, self.ledger.step)
        count = max(1, self.options.batch_tokens // length)
        first = self.ledger.step * count
        rows = windows(self.corpus.train_ids, first=first, count=count, length=length)
        loss = self.loss(self.forward, rows)
        torch.autograd.backward(loss)
        self.optimizer.step(rate_factor(progress(self.options, self.ledger)))
        self.ledger.record(loss.item(), rows.size)

    @torch.no_grad()
    def validate(self, max_tokens: int | None = None) -> float:
        """Mean loss over the held-out files, or over their first `max_tokens`."""
        ids, length = self.corpus.validation_ids[:max_tokens], self.options.seq_len
        rows = all_windows(ids, length=length)
        parts = np.array_split(rows, math.ceil(rows.size / max(length, self.options.batch_tokens)))
        sums = [self.loss(self.model, part).item() * len(part) for part in parts]
        return sum(sums) / len(rows)


def report(trainer: Trainer, spent: float) -> None:
    ledger = trainer.ledger
    minutes, seconds = divmod(round(ledger.seconds * (1 - spent) / max(spent, 1e-9)), 60)
    print(
        f"step {ledger.step}  loss {fmean(ledger.losses[-20:]):.3f}  "
        f"{ledger.tokens / ledger.seconds:.0f} tokens/s  left {minutes}:{seconds:02d}",
        flush=True,
    )


def train(trainer: Trainer) -> None:
    """Step until the budget is spent; quick validations count as time spent."""
    ledger, mark = trainer.ledger, time.monotonic()
    while (spent := progress(trainer.options, ledger)) < 1:
        trainer.step()
        now = time.monotonic()
        ledger.seconds, mark = ledger.seconds + now - mark, now
        if ledger.step % 20 == 0:
            report(trainer, spent)
        if ledger.step % trainer.options.validate_every == 0:
            print(f"step {ledger.step}  validation {trainer.validate(16384):.3f}", flush=True)


def card(trainer: Trainer, validation_loss: float) -> str:
    """The model card, from what this run did."""
    model, corpus, ledger, options = trainer.model, trainer.corpus, trainer.ledger, trainer.options
    is_stdlib = options.sources is None
    return tiny_card.CARD.format(
        architecture=tiny_card.ARCHITECTURE.format(
            parameters=model.num_parameters(), **model.config.to_dict()
        ),
        vocabulary=model.config.vocab_size,
        num_files=corpus.num_files,
        num_validation_files=corpus.num_validation_files,
        num_tokens=len(corpus.train_ids),
        num_validation_tokens=len(corpus.validation_ids),
        steps=ledger.step,
        tokens=ledger.tokens,
        minutes=ledger.seconds / 60,
        train_loss=fmean(ledger.losses),
        num_losses=len(ledger.losses),
        validation_loss=validation_loss,
        seq_len=options.seq_len,
        **tiny_card.origin(is_stdlib=is_stdlib, version=platform.python_version()),
        command=tiny_card.command(asdict(options)),
    )


def write_folder(trainer: Trainer, tokenizer: Tokenizer) -> None:
    """Weights, configs, tokenizer and card."""
    out, validation_loss = trainer.options.out, trainer.validate()
    trainer.model.save_pretrained(out)
    wrap_tokenizer(tokenizer).save_pretrained(out)
    (out / "README.md").write_text(card(trainer, validation_loss), encoding="utf-8")
    print(f"wrote {out.name}: validation {validation_loss:.3f}", flush=True)
