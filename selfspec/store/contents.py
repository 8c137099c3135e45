"""Defines what a cache folder holds, in memory, and which tokenizer it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from numpy.typing import NDArray

from selfspec.draft.fitted import FittedTree
from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import CacheTokenizerError

Arrays = Mapping[str, NDArray[Any]]

_IDS = ("tokens", "pairs", "ids")  # The arrays of a LUT that hold token ids.


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
    """All that a cache folder keeps."""

    tokenizer: TokenizerInfo  # Whose ids these are.
    tables: Mapping[str, Arrays] = field(default_factory=dict)  # by source: "lut" and "lut2"
    corpus: CorpusTables | None = None
    calibration: list[list[Any]] | None = None  # the rates that `Calibration.rows` returned
    fitted: FittedTree | None = None  # the tree that `selfspec tune` has fitted
    about: Mapping[str, Any] = field(default_factory=dict)  # for people to read; valid JSON
    num_ids: int | None = None  # as the card says it; None as long as nobody has counted

    def count_ids(self) -> int:
        """1 + the largest token id in any table; costs one pass over everything.

        It may be larger than the tokenizer's vocabulary, since many models pad their logits.
        """
        return 1 + max((int(array.max()) for array in self._id_arrays() if array.size), default=-1)

    def facts(self) -> dict[str, Any]:
        """What the card says about the tables, for people to read and for `verify_cache`."""
        counts = {name: len(arrays["ids"]) for name, arrays in self.tables.items()}
        if self.corpus is not None:
            counts["prefixes"] = int(self.corpus.num_prefixes)
            counts["continuations"] = int(self.corpus.num_continuations)
        if self.fitted is not None:
            counts["fitted_nodes"] = self.fitted.width
        if self.calibration:
            counts["calibration"] = len(self.calibration)
        return {
            "num_ids": self.count_ids(),
            "counts": counts,
            "top_k": max((each["ids"].shape[1] for each in self.tables.values()), default=None),
            "max_prefix": None if self.corpus is None else self.corpus.max_prefix,
        }

    def _id_arrays(self) -> Iterable[NDArray[Any]]:
        for arrays in self.tables.values():
            yield from (arrays[name] for name in _IDS if name in arrays)
        if self.corpus is not None:
            arrays = self.corpus.arrays()
            yield from (
                arrays[name] for name in arrays if name.startswith(("token.", "next_token."))
            )


def tokenizer_info(tokenizer: Any) -> TokenizerInfo:
    """The fingerprint of a tokenizer: a hash over its vocabulary, sorted by id.

    Added and special tokens are part of it, merges and templates are not. Of a name that is a path
    only the last part is kept, so that the same tokenizer gives the same card in any folder.
    """
    if isinstance(tokenizer, TokenizerInfo):
        return tokenizer
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise CacheTokenizerError(f"tokenizer must have a get_vocab() (got {tokenizer!r:.80})")
    vocabulary = sorted((int(id_), token) for token, id_ in tokenizer.get_vocab().items())
    text = json.dumps(vocabulary, separators=(",", ":"))
    fingerprint = hashlib.sha256(text.encode("ascii")).hexdigest()
    vocab_size = vocabulary[-1][0] + 1 if vocabulary else 0
    return TokenizerInfo(fingerprint, _short_name(tokenizer), vocab_size)


def unnamed_tokenizer(vocab_size: int) -> TokenizerInfo:
    """What stands for a tokenizer if only the size of the model's vocabulary is known."""
    name = f"a vocabulary of {vocab_size} tokens"
    return TokenizerInfo(hashlib.sha256(name.encode()).hexdigest(), name, vocab_size)


def is_unnamed(tokenizer: TokenizerInfo) -> bool:
    """Was it made by `unnamed_tokenizer`?"""
    return tokenizer == unnamed_tokenizer(tokenizer.vocab_size)


def _short_name(tokenizer: Any) -> str:
    """A Hub id as it is, and of a path the last part."""
    name = str(getattr(tokenizer, "name_or_path", ""))
    is_hub_id = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name
    return name if is_hub_id else PurePath(name.replace("\\", "/")).name
