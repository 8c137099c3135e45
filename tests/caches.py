"""Small cache contents of every kind, and random ones; memory that learns without a model."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import numpy as np

from selfspec.cache import CacheContents, RememberedFile, TokenizerInfo
from selfspec.cache.memory_loader import DraftMemoryLoader
from selfspec.config import SpecConfig
from selfspec.records import TopK

VOCAB_SIZE = 50
OWNER = TokenizerInfo("5a" * 32, "owner/toy", VOCAB_SIZE)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 9, 2, 7, 3, 1, 4, 2]


class FakeTokenizer:
    """A vocabulary and a name: all that a fingerprint is made of."""

    def __init__(self, num_tokens: int = VOCAB_SIZE, name: str = "owner/toy") -> None:
        self.vocab = {f"token {id_}": id_ for id_ in range(num_tokens)}
        self.name_or_path = name

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def lut(tokens: Sequence[int] = (1, 3, 9), top_k: int = 4) -> dict[str, np.ndarray]:
    ids = (np.arange(len(tokens) * top_k) % VOCAB_SIZE).reshape(-1, top_k)
    return {
        "tokens": np.array(tokens, np.int32),
        "ids": ids.astype(np.int32),
        "probabilities": np.full(ids.shape, 0.25, np.float16),
    }


def lut2(pairs: Sequence[tuple[int, int]] = ((1, 4), (3, 1)), top_k: int = 4):
    arrays = lut(range(len(pairs)), top_k)
    del arrays["tokens"]
    return {"pairs": np.array(pairs, np.int32).reshape(-1, 2), **arrays}


def rates() -> list:
    return [
        [[["lut", 0, 1, 1, 0]], 3.5, 5.0],
        [[["lut", 0, 1, 1, 0], ["near_misses", 0, 1, 1, 2]], 1.0, 4.0],
    ]


def contents(**changes) -> CacheContents:
    """One of each kind."""
    fields = {
        "tokenizer": OWNER,
        "tables": {"lut": lut(), "lut2": lut2()},
        "calibration": rates(),
        "answers": np.array([3, 1, 4, -1, 5, -1], np.int32),
        "about": {"corpus": "digits of π", "licence": "none", "tokens": len(TEXT)},
    }
    return CacheContents(**{**fields, **changes})


def plain(held: CacheContents) -> tuple:
    """Everything in it as plain values, so that two can be compared."""
    return (
        held.tokenizer,
        {source: _plain(arrays) for source, arrays in held.tables.items()},
        held.calibration,
        None if held.answers is None else held.answers.tolist(),
        dict(held.about),
    )


def _plain(arrays) -> dict[str, tuple]:
    return {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in arrays.items()}


def remembering(path) -> DraftMemoryLoader:
    """What a `SelfSpec` has with `remember`."""
    remembered = RememberedFile(path, OWNER, saves=True)
    return DraftMemoryLoader(SpecConfig(sources=("lut", "lut2")), remembered=remembered)


def learn(on_demand: DraftMemoryLoader, tokens: Sequence[int], id_: int = 5) -> None:
    shape = (len(tokens), 8)
    top = TopK(np.full(shape, id_, np.int32), np.full(shape, 0.1, np.float16))
    pairs = np.array([[-1, token] for token in tokens], np.int64).reshape(-1, 2)
    on_demand.of(VOCAB_SIZE).sources[0].observe_pairs(pairs, top)


def add_rows(path, tokens: Sequence[int]) -> None:
    """What a process does that learns: each token in a save of its own."""
    on_demand = remembering(path)
    for token in tokens:
        learn(on_demand, [token])
        on_demand.save()


def die_while_saving(path, step: str) -> None:
    """The process is killed at a call of the system."""
    setattr(os, step, lambda *_args: os.kill(os.getpid(), signal.SIGKILL))
    add_rows(path, [2])
