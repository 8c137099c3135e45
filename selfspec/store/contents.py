"""What a cache folder holds, as values in memory, and the tokenizer that it is tied to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from numpy.typing import NDArray

from selfspec.draft.sources.corpus import CorpusTables
from selfspec.errors import CacheTokenizerError

__all__ = ["Arrays", "CacheContents", "TokenizerInfo", "tokenizer_info"]

Arrays = Mapping[str, NDArray[Any]]

_IDS = ("tokens", "pairs", "ids")  # the arrays of a LUT that hold token ids


@dataclass(frozen=True)
class TokenizerInfo:
    """Which tokenizer the ids belong to; `fingerprint` alone decides whether two are the same."""

    fingerprint: str
    name: str
    vocab_size: int

    def __str__(self) -> str:
        return f"{self.fingerprint[:8]}… ({self.name})" if self.name else f"{self.fingerprint[:8]}…"


@dataclass(frozen=True, kw_only=True)
class CacheContents:
    """All that a cache folder keeps.

    Attributes:
        tokenizer: Whose ids these are.
        tables: By source: ``"lut"`` and ``"lut2"``, each with the arrays that it gave.
        corpus: The n-gram tables.
        calibration: The rates that `Calibration.rows` gave.
        about: Where it comes from, for people: corpus, licence, command. Whatever JSON can say.
    """

    tokenizer: TokenizerInfo
    tables: Mapping[str, Arrays] = field(default_factory=dict)
    corpus: CorpusTables | None = None
    calibration: list[list[Any]] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    num_ids: int | None = None  # as the card says; None: nobody has counted yet

    def count_ids(self) -> int:
        """1 + the largest token id that is held anywhere; costs one pass over everything.

        It may pass the tokenizer's vocabulary: many models' logits are padded wider.
        """
        return 1 + max((int(array.max()) for array in self._id_arrays() if array.size), default=-1)

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

    Added and special tokens count, merges and templates don't. A name that is a path is cut to
    its last part, so that the same tokenizer gives the same card wherever it lies.
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


def _short_name(tokenizer: Any) -> str:
    """A Hub id as it is; of a path the last part."""
    name = str(getattr(tokenizer, "name_or_path", ""))
    is_hub_id = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and "\\" not in name
    return name if is_hub_id else PurePath(name.replace("\\", "/")).name
