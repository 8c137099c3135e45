"""What a cache holds, in memory, and which tokenizer it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from selfspec.errors import no_tokenizer

Arrays = Mapping[str, NDArray[Any]]

# Which array of a LUT holds the keys of its rows.
KEY_OF = {"lut": "tokens", "lut2": "pairs"}


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that ids belong to. Two with the same `fingerprint` are the same."""

    fingerprint: str
    name: str
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.fingerprint[:8]}… ({self.name})" if self.name else f"{self.fingerprint[:8]}…"


@dataclass(frozen=True, kw_only=True)
class CacheContents:
    tokenizer: TokenizerInfo  # Whose ids these are.
    tables: Mapping[str, Arrays] = field(default_factory=dict)  # One for each of "lut", "lut2".
    calibration: list[list[Any]] | None = None  # From `Calibration.rows`.
    answers: NDArray[np.int32] | None = None  # Each text has -1 after it.
    about: Mapping[str, Any] = field(default_factory=dict)  # For people to read, valid JSON.

    def count_ids(self) -> int:
        """1 + the largest token id in any table; costs one pass over all ids.

        It may be larger than the tokenizer's vocabulary, since many models pad their logits.
        """
        ids = [table[name] for key, table in self.tables.items() for name in (KEY_OF[key], "ids")]
        if self.answers is not None:
            ids.append(self.answers)
        return 1 + max((int(array.max()) for array in ids if array.size), default=-1)

    def below(self, num_ids: int) -> CacheContents:
        """Without the token ids from `num_ids` on, in tables and answers."""

        def cut(ids: NDArray[Any]) -> NDArray[Any]:
            return np.where(ids < num_ids, ids, np.int32(-1))

        tables = {}
        for source, table in self.tables.items():
            keys = table[KEY_OF[source]]
            known = (keys < num_ids).all(axis=tuple(range(1, keys.ndim)))
            rows = {name: array[known] for name, array in table.items()}
            tables[source] = {**rows, "ids": cut(rows["ids"])}
        answers = None if self.answers is None else cut(self.answers)
        return replace(self, tables=tables, answers=answers)


def check_table(source: str, table: Mapping[str, Any]) -> None:
    """Checks shapes and lower bounds of a LUT or of answers. Upper bounds depend on the model."""
    if source == "answers" and set(table) == {"tokens"}:
        tokens = table["tokens"]
        if tokens.dtype != np.int32 or tokens.ndim != 1 or tokens.min(initial=0) < -1:
            raise ValueError("its answers must be one row of int32, without ids below -1")
        return
    key = KEY_OF.get(source)
    if key is None or set(table) != {key, "ids", "probabilities"}:
        raise ValueError(f"it holds a table that selfspec does not know ({source!r:.40})")
    keys, ids, probabilities = table[key], table["ids"], table["probabilities"]
    if not (
        (keys.dtype, ids.dtype, probabilities.dtype) == (np.int32, np.int32, np.float16)
        and ids.ndim == 2
        and ids.shape == probabilities.shape
        and keys.shape == ((len(ids), 2) if source == "lut2" else (len(ids),))
        and ids.min(initial=0) >= -1
        and keys.min(initial=0) >= 0
    ):
        raise ValueError(f"its table {source} has a wrong shape, a wrong dtype or negative ids")


class Tokenizer(Protocol):
    """The methods that a fingerprint needs. Tokenizers of transformers have them."""

    name_or_path: str

    def get_vocab(self) -> dict[str, int]: ...


def tokenizer_info(tokenizer: Tokenizer | TokenizerInfo) -> TokenizerInfo:
    """The fingerprint of a tokenizer: a hash over its vocabulary, sorted by id.

    It includes added and special tokens, but neither merges nor templates. If the name is a path,
    only its last part is kept, so that the same tokenizer gives the same card in any folder.
    """
    if isinstance(tokenizer, TokenizerInfo):
        return tokenizer
    if not hasattr(tokenizer, "get_vocab"):
        raise no_tokenizer(tokenizer)
    vocabulary = sorted((int(id_), token) for token, id_ in tokenizer.get_vocab().items())
    text = json.dumps(vocabulary, separators=(",", ":"))
    fingerprint = hashlib.sha256(text.encode("ascii")).hexdigest()
    vocab_size = vocabulary[-1][0] + 1 if vocabulary else 0
    name = _short_name(str(getattr(tokenizer, "name_or_path", "")))
    return TokenizerInfo(fingerprint, name, vocab_size)


def _short_name(name: str) -> str:
    is_hub_id = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name
    return name if is_hub_id else PurePath(name.replace("\\", "/")).name
