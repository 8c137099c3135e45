"""Train the embedded tiny model: a byte-level BPE and a small Llama, on Python's own library.

    python -m tools.train_tiny --out FOLDER --minutes 60 --threads 2 --compile

Writes an ordinary transformers folder in bfloat16. The last line is one JSON object with what the
run spent and reached, for the model's card. Under a time limit two runs differ in their number of
steps, so in weights. With --hybrid it is a Qwen3.5 of the same size, whose layers keep a running
state; --begin lets its matrices be those of the embedded model at first.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from eval.benches.python_files import list_sources, read_source, stdlib_folder
from eval.errors import EvalError, exit_status
from eval.options import check_at_least
from eval.runs.environment import tell

_EOS, _PAD = "<|eos|>", "<|pad|>"
_VOCABULARY = 8192
_POSITIONS = 2048
_HELD_OUT = 0.02  # of the files
_WARM_UP = 0.02  # of the budget
_LONG_EVERY = 8  # One of so many batches has full length, so that far positions are trained.
# Of layers that keep a state, as many parameters as attention has.
_STATES: dict[str, Any] = {
    "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
}
_PARTIAL = {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.25}
_GOLDEN = (math.sqrt(5) - 1) / 2


class Corpus(NamedTuple):
    """Both splits as one long row of ids each: file, eos, file, eos, …"""

    train_ids: np.ndarray
    held_out_ids: np.ndarray


def run(options: argparse.Namespace) -> int:
    """From sources to folder."""
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    corpus, tokenizer = _corpus(options)
    print(f"{len(corpus.train_ids)} tokens, {len(corpus.held_out_ids)} held out", flush=True)
    model = _new_model(tokenizer, options)
    found = _train(model, corpus.train_ids, options)
    found["held_out_loss"] = _held_out_loss(model, corpus.held_out_ids, options)
    model.to(torch.bfloat16).save_pretrained(options.out)
    _wrapped(tokenizer).save_pretrained(options.out)
    sizes = {"num_tokens": len(corpus.train_ids), "num_held_out": len(corpus.held_out_ids)}
    return tell("train_tiny", options, **sizes, **found)


def _corpus(options: argparse.Namespace) -> tuple[Corpus, Tokenizer]:
    """Reads, splits and packs the sources; the tokenizer sees the training files only."""
    paths = list_sources(options.sources or stdlib_folder())
    if len(paths) < 2:
        raise EvalError(f"--sources must hold at least 2 .py files with text (got {len(paths)})")
    texts = [read_source(path) for path in random.Random(options.seed).sample(paths, len(paths))]
    num_held_out = max(1, round(_HELD_OUT * len(paths)))
    train, held_out = texts[num_held_out:], texts[:num_held_out]
    tokenizer = _new_tokenizer(train)
    packed = (_packed(tokenizer, part, options.seq_len) for part in (train, held_out))
    return Corpus(*packed), tokenizer


def _new_tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_EOS, _PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _packed(tokenizer: Tokenizer, texts: Sequence[str], least: int) -> np.ndarray:
    """One row of ids, each text closed by eos."""
    eos_id = tokenizer.token_to_id(_EOS)
    rows = [[*encoding.ids, eos_id] for encoding in tokenizer.encode_batch(texts)]
    ids = np.concatenate([np.array(row, dtype=np.int64) for row in rows])
    if len(ids) < least:
        raise EvalError(
            f"each split must hold at least one window of {least} tokens (got {len(ids)}); give "
            "more sources or a shorter --seq-len"
        )
    return ids


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers knows it; pads left, as generation needs."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_EOS,
        pad_token=_PAD,
        padding_side="left",
        model_max_length=_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _new_model(tokenizer: Tokenizer, options: argparse.Namespace) -> PreTrainedModel:
    ids = {"eos_token_id": tokenizer.token_to_id(_EOS), "pad_token_id": tokenizer.token_to_id(_PAD)}
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 688,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        **ids,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        if options.hybrid:
            config = Qwen3_5TextConfig(**sizes, **_STATES, rope_parameters={**rope, **_PARTIAL})
            model: PreTrainedModel = Qwen3_5ForCausalLM(config)
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope))
    if options.begin is not None:
        _begin(model, options.begin)
    model.to(options.device)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


@torch.no_grad()
def _begin(model: PreTrainedModel, folder: Path) -> None:
    """Matrices begin as those of the same name and shape in another trained model."""
    trained = LlamaForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and getattr(trained.get(name), "shape", None) == weight.shape:
            weight.copy_(trained[name])


def _train(model: nn.Module, ids: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Steps until the budget is spent; the rate warms up, and falls to zero where the budget ends.

    bfloat16 would lose a change of less than 1/256 of a weight, so weights are trained in float32.
    """
    forward: Callable[..., Any] = torch.compile(model, dynamic=False) if options.compile else model
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    losses: list[float] = []
    num_tokens, start = 0, monotonic()
    while (spent := _spent(options, len(losses), monotonic() - start)) < 1:
        is_long = len(losses) % _LONG_EVERY == _LONG_EVERY - 1
        length = min(_POSITIONS, len(ids)) if is_long else options.seq_len
        rows = _windows(ids, len(losses), max(1, options.batch_tokens // length), length)
        loss = _loss(forward, rows, options)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * _rate(spent)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        num_tokens += rows.size
        if len(losses) % 20 == 0:
            print(f"step {len(losses)}  loss {fmean(losses[-20:]):.3f}  {spent:.0%}", flush=True)
    seconds = monotonic() - start
    told = {"num_steps": len(losses), "num_seen": num_tokens, "seconds": round(seconds)}
    return {**told, "loss": fmean(losses[-100:])}


def _spent(options: argparse.Namespace, num_steps: int, seconds: float) -> float:
    """The share of the budget that is spent."""
    return num_steps / options.steps if options.steps else seconds / (60 * options.minutes)


def _rate(spent: float) -> float:
    """Warm-up, then a cosine."""
    if spent < _WARM_UP:
        return spent / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (spent - _WARM_UP) / (1 - _WARM_UP)))


def _windows(ids: np.ndarray, step: int, count: int, length: int) -> np.ndarray:
    """The windows of a step: steps of the golden ratio spread the starts evenly at any count."""
    starts = (step * count + np.arange(count)) * _GOLDEN % 1.0 * (len(ids) - length + 1)
    return np.stack([ids[start : start + length] for start in starts.astype(np.int64)])


def _loss(forward: Callable[..., Any], rows: np.ndarray, options: Any) -> torch.Tensor:
    ids = torch.from_numpy(rows).to(options.device)  # (B, L)
    loss: torch.Tensor = forward(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


@torch.no_grad()
def _held_out_loss(model: nn.Module, ids: np.ndarray, options: argparse.Namespace) -> float:
    """Nats a token, over windows side by side."""
    rows = ids[: len(ids) // options.seq_len * options.seq_len].reshape(-1, options.seq_len)
    return fmean(_loss(model, row[None], options).item() for row in rows)


def _check(options: argparse.Namespace) -> None:
    """Refuses numbers that no run can use."""
    check_at_least(options, 1, "steps", "batch_tokens", "threads")
    for name in ("minutes", "lr"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise EvalError(f"--{name} must be > 0 (got {value})")
    if not 2 <= options.seq_len <= _POSITIONS:
        raise EvalError(f"--seq-len must be 2 to {_POSITIONS} (got {options.seq_len})")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the model")
    add("--begin", type=Path, metavar="FOLDER", help="a Llama whose matrices to begin with")
    add("--hybrid", action="store_true", help="four of six layers keep a state, as in Qwen3.5")
    add("--sources", type=Path, help="folder of .py files (default: the standard library)")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="how many steps to train")
    budget.add_argument("--minutes", type=float, help="how long to train")
    add("--seed", type=int, default=0, help="of split and weights")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--batch-tokens", type=int, default=2048, help="tokens in a batch")
    add("--seq-len", type=int, default=512, help="tokens in a window")
    add("--threads", type=int, help="CPU threads (default: torch's own choice)")
    add("--device", default="cpu", help="cpu or cuda")
    add("--compile", action="store_true", help="torch.compile the forward; needs a compiler")


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__)
    add_options(command)
    sys.exit(exit_status(lambda: run(command.parse_args())))
