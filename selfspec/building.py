"""Builds a cache: whole texts, and the tables that a model has filled while it read them.

Texts come in the same order every time. A document is a text file, or a line of a ``.jsonl`` file
that holds token ids, a text, or the messages of a conversation. Whatever else `datasets` can load
can be written in this form by its ``to_json()``.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from torch.nn.utils.rnn import pad_sequence

from selfspec.cache import CacheContents, tokenizer_info
from selfspec.cache.contents import Arrays
from selfspec.cache.memory_loader import DraftMemoryLoader
from selfspec.config import SpecConfig
from selfspec.draft.memory import DraftMemory
from selfspec.draft.sources.answers import MAX_TOKENS
from selfspec.errors import BuildError, first_mistake, one_line
from selfspec.forward.model import max_positions, vocab_size
from selfspec.learning import top_k_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TokenIds = NDArray[np.int64]

_PIECE = 1 << 20  # Bytes. A longer text file is several documents, cut at ends of lines.
_MAX_LOGITS = 1 << 28  # Elements of one forward's output, to bound its memory.
_WINDOW, _ROWS = 256, 8  # Tokens that are read in a row, and rows in a forward.


def build_cache(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    load_model: Callable[[], PreTrainedModel],
    *,
    num_tokens: int = 1_000_000,
    say: Callable[[str], object] = lambda _: None,
) -> CacheContents:
    """What a cache of the documents in `data` holds.

    The model that `load_model` gives fills tables with what it predicts after the first
    `num_tokens` tokens. With 0 it is not loaded. `say` is told how far the model has read.
    """
    owner = tokenizer_info(tokenizer)
    texts, num_left_out = _texts(data, tokenizer)
    answers = np.concatenate(texts)[:MAX_TOKENS].astype(np.int32)
    answers[-1] = -1  # The last one may have been cut.
    # The card has no times, paths or machines: the same texts give the same file.
    about: dict[str, Any] = {
        "data": Path(data).expanduser().resolve().name,
        "documents": len(texts),
        "tokens": sum(map(len, texts)) - len(texts),
        "left_out": num_left_out,
    }
    tables: dict[str, Arrays] = {}
    if num_tokens:
        documents = (ids for ids in read_ids(data, tokenizer) if ids is not None)
        tables, about["tokens_read"] = _tables(documents, load_model(), num_tokens, say)
        about["model"] = owner.name
    return CacheContents(tokenizer=owner, tables=tables, answers=answers, about=about)


def _tables(
    documents: Iterator[TokenIds],
    model: PreTrainedModel,
    most_tokens: int,
    say: Callable[[str], object],
) -> tuple[dict[str, Arrays], int]:
    """The LUTs that the model has filled, and how many tokens it has read for them."""
    learned = DraftMemoryLoader(SpecConfig()).of(vocab_size(model))
    num_read = 0
    for num_tokens in teach(learned, model.eval(), documents):
        num_read += num_tokens
        say(f"{num_read:,} of about {most_tokens:,} tokens read")
        if num_read >= most_tokens:
            break
    return dict(learned.tables()), num_read


def _texts(data: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[NDArray[np.int64]], int]:
    """The first documents, with -1 after them, and how many empty ones were left out.

    They have as many tokens as a `SelfSpec` keeps, or more by a part of the last one.
    """
    texts: list[NDArray[np.int64]] = []
    size = num_left_out = 0
    for ids in read_ids(data, tokenizer):
        if ids is None:
            num_left_out += 1
            continue
        texts.append(np.append(ids, -1))
        size += len(texts[-1])
        if size >= MAX_TOKENS:
            break
    if not texts:
        emptied = ", whose documents are empty, or messages that no chat template of MODEL takes"
        why = emptied if num_left_out else ""
        raise BuildError(f"--data must hold a document with text in it (got {data!r}{why})")
    return texts, num_left_out


def teach(
    learned: DraftMemory, model: PreTrainedModel, documents: Iterable[TokenIds]
) -> Iterator[int]:
    """Shows the sources of `learned` what the model predicts after the tokens of the documents.

    Documents are cut into windows. Yields the number of tokens in a forward.
    """
    length = min(_WINDOW, max_positions(model) or _WINDOW)
    num_rows = max(1, min(_ROWS, _MAX_LOGITS // (vocab_size(model) * length)))
    windows = (
        ids[start : start + length] for ids in documents for start in range(0, len(ids), length)
    )
    while batch := list(islice(windows, num_rows)):
        for window, logits in zip(batch, _logits(model, batch), strict=True):
            # (N, 2): the token before, or -1, and the token itself.
            pairs = np.stack([np.append(-1, window[:-1]), window], axis=-1)
            learned.observe_pairs(pairs, top_k_of(logits[: len(window)], learned.top_k))
        yield sum(map(len, batch))


@torch.inference_mode()
def _logits(model: PreTrainedModel, windows: Sequence[TokenIds]) -> torch.Tensor:
    """The logits (B, N, V) after all tokens of some windows, by one forward."""
    ids = [torch.from_numpy(window) for window in windows]
    input_ids = pad_sequence(ids, batch_first=True)
    mask = pad_sequence([torch.ones_like(window) for window in ids], batch_first=True)
    logits: torch.Tensor = model(
        input_ids=input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        use_cache=False,
    ).logits
    return logits


class _Line(BaseModel):
    """What may be in a line. The answers of `selfspec batch` have their ids and more fields."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_ids(data: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[TokenIds | None]:
    """The documents' token ids; None for one that is empty or that the chat template refuses.

    A wrong path is refused at once.
    """
    return chain.from_iterable(_documents(path, tokenizer) for path in find_files(data))


def find_files(data: str) -> list[Path]:
    """The files that `data` names: one, those of a folder that are not hidden, or a glob's."""
    path = Path(data).expanduser()
    if path.is_file():
        return [path]
    pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if not (files := [file for file in files if file.is_file()]) or not data:
        raise BuildError(
            "--data must be a file, a folder with files in it, or a glob such as 'notes/**/*.md' "
            f"(got {data!r})"
        )
    return files


def _documents(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[TokenIds | None]:
    where = str(path)
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    where = f"{path}, line {number}"
                    if line.strip():
                        yield _ids_of(_Line.model_validate_json(line), tokenizer)
        else:
            for text in _pieces(path):
                yield _ids_of(_Line(text=text), tokenizer)
    except ValidationError as error:
        raise BuildError(f"--data can't be read ({where}: {first_mistake(error)})") from error
    except (OSError, TypeError, ValueError) as error:  # A template may raise any of them.
        why = shorten(one_line(error), 200, placeholder=" …")
        raise BuildError(f"--data can't be read ({where}: {why})") from error


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file. Bytes that are not UTF-8 become replacement characters.

    A file that is not text gives nothing, since a folder of sources may hold pictures too.
    """
    with path.open("rb") as stream:
        if b"\0" in stream.read(4096):
            return
        stream.seek(0)
        while lines := stream.readlines(_PIECE):
            yield b"".join(lines).decode(errors="replace")


def _ids_of(line: _Line, tokenizer: PreTrainedTokenizerBase) -> TokenIds | None:
    from jinja2 import TemplateError

    ids: list[int] | None = line.ids
    if ids is None and line.text is not None:
        ids = tokenizer(line.text, verbose=False)["input_ids"] if line.text else []
    elif ids is None and line.messages is not None:
        if not tokenizer.chat_template:
            return None
        try:
            ids = tokenizer.apply_chat_template(line.messages, return_dict=False)
        except TemplateError:  # For example, one speaker has two turns in a row.
            return None
    elif ids is None:
        raise ValueError("it must have ids, a text, or messages")
    return np.array(ids, np.int64) if ids else None
