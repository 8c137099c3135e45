"""From `.py` files to two rows of token ids, for training the embedded tiny model.

Knows files, texts and ids; neither models nor how they are trained. The same sources and seed give
the same files in the same order, whatever the folder they lie in is called.
"""

from __future__ import annotations

import math
import random
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eval.errors import EvalError

EOS, PAD = "<|eos|>", "<|pad|>"
MAX_VOCABULARY = 8192
HELD_OUT = 0.02  # of the files
GOLDEN = (math.sqrt(5) - 1) / 2

EXCLUDED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
# Build settings of one machine, not written by people.
GENERATED = re.compile(r"(_sysconfigdata|config-\d)")
# A line of a codec or entity table: a literal first, then a colon or a comment at most.
TABLE_LINE = re.compile(r"""\s*\(?(0x|\d|u?(['"]).{1,40}\2\s*(:|#)|b?'\\x)""")


@dataclass(frozen=True)
class Corpus:
    """Both splits as one long row of ids each: file, eos, file, eos, …"""

    train_ids: np.ndarray
    validation_ids: np.ndarray
    num_files: int
    num_validation_files: int


def stdlib_folder() -> Path:
    """Where the running interpreter keeps its own `.py` files."""
    return Path(sysconfig.get_path("stdlib"))


def is_wanted(relative: Path) -> bool:
    """Whether a path names hand-written library code; tests and build settings do not."""
    if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
        return False
    return not any(GENERATED.match(part) for part in relative.parts)


def is_table(text: str) -> bool:
    """Whether more than half of the lines with text are table lines, as in a codec's file."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(bool(TABLE_LINE.match(line)) for line in lines) > len(lines) / 2


def read_source(path: Path) -> str:
    """The text in the encoding that the file itself declares."""
    with tokenize.open(path) as file:
        return file.read()


def list_sources(folder: Path) -> list[Path]:
    """All wanted `.py` files with text below `folder`, in an order that depends on names alone."""
    paths = sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix())
    wanted = [path for path in paths if is_wanted(path.relative_to(folder))]
    return [path for path in wanted if (text := read_source(path).strip()) and not is_table(text)]


def split_sources(paths: Sequence[Path], *, seed: int) -> tuple[list[Path], list[Path]]:
    """Shuffle, then hold out a share of the files, at least one, for validation."""
    if len(paths) < 2:
        raise EvalError(f"--sources must hold at least 2 .py files with text (got {len(paths)})")
    shuffled = random.Random(seed).sample(paths, len(paths))
    num_held_out = max(1, round(HELD_OUT * len(paths)))
    return shuffled[num_held_out:], shuffled[:num_held_out]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE: every text has ids, and they decode to that very text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """One row of ids, each text closed by eos; 2 bytes a token."""
    eos_id = tokenizer.token_to_id(EOS)
    rows = [[*encoding.ids, eos_id] for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate([np.array(row, dtype=np.uint16) for row in rows])


def build_corpus(folder: Path, *, seed: int) -> tuple[Corpus, Tokenizer]:
    """Read, split and pack the sources; the tokenizer sees the training files only."""
    train_paths, validation_paths = split_sources(list_sources(folder), seed=seed)
    train = [read_source(path) for path in train_paths]
    validation = [read_source(path) for path in validation_paths]
    tokenizer = train_tokenizer(train)
    ids = pack(tokenizer, train), pack(tokenizer, validation)
    return Corpus(*ids, num_files=len(train), num_validation_files=len(validation)), tokenizer


def windows(ids: np.ndarray, *, first: int, count: int, length: int) -> np.ndarray:
    """Windows number `first` to `first + count` of an endless walk over `ids`.

    Steps of the golden ratio spread the starts evenly over `ids` at any count.
    """
    _check_length(ids, length)
    spread = (first + np.arange(count)) * GOLDEN % 1.0
    starts = (spread * (len(ids) - length + 1)).astype(np.int64)
    return np.stack([ids[start : start + length] for start in starts]).astype(np.int64)


def all_windows(ids: np.ndarray, *, length: int) -> np.ndarray:
    """All of `ids` as windows side by side, less a rest that fills none."""
    _check_length(ids, length)
    return ids[: len(ids) // length * length].reshape(-1, length).astype(np.int64)


def _check_length(ids: np.ndarray, length: int) -> None:
    if len(ids) < length:
        raise EvalError(
            f"each split must hold at least one window of {length} tokens (got {len(ids)}); "
            "give more sources or shorter windows"
        )
