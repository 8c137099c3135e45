"""Builds a cache of whole texts.

Texts come in the same order every time. A document is a text file, or a line of a ``.jsonl`` file
that holds token ids, a text, or the messages of a conversation. Whatever else `datasets` can load
can be written in this form by its ``to_json()``.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from selfspec.cache import CacheContents, tokenizer_info
from selfspec.draft.sources.answers import MAX_TOKENS
from selfspec.errors import BuildError, first_mistake, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = NDArray[np.int64]

_PIECE = 1 << 20  # Bytes. A longer text file is several documents, cut at ends of lines.


def build_cache(data: str, tokenizer: PreTrainedTokenizerBase) -> CacheContents:
    """What a cache of the documents in `data` holds: as many tokens as a `SelfSpec` keeps."""
    texts: list[TokenIds] = []
    size = 0
    for ids in read_ids(data, tokenizer):
        texts.append(np.append(ids, -1))
        size += len(texts[-1])
        if size >= MAX_TOKENS:
            break
    if not texts:
        raise BuildError(
            "--data must hold a document with text in it, or messages that the chat template of "
            f"MODEL takes (got {data!r})"
        )
    answers = np.concatenate(texts)[:MAX_TOKENS].astype(np.int32)
    answers[-1] = -1  # The last one may have been cut.
    # The card has no times, paths or machines: the same texts give the same file.
    name = Path(data).expanduser().resolve().name
    about = {"data": name, "documents": len(texts), "tokens": size - len(texts)}
    return CacheContents(tokenizer=tokenizer_info(tokenizer), answers=answers, about=about)


class _Line(BaseModel):
    """What may be in a line. The answers of `selfspec batch` have their ids and more fields."""

    ids: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_ids(data: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[TokenIds]:
    """The ids of the documents, but of those that are empty or that the chat template refuses.

    A wrong path is refused at once.
    """
    documents = (_documents(path, tokenizer) for path in find_files(data))
    return filter(len, chain.from_iterable(documents))


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


def _documents(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[TokenIds]:
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


def _ids_of(line: _Line, tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    from jinja2 import TemplateError

    ids = line.ids or []
    if line.ids is None and line.text is not None:
        ids = tokenizer(line.text, verbose=False)["input_ids"] if line.text else []
    elif line.ids is None and line.messages is not None:
        try:  # A template refuses, for example, two turns in a row of one speaker.
            if tokenizer.chat_template:
                ids = tokenizer.apply_chat_template(line.messages, return_dict=False)
        except TemplateError:
            pass
    elif line.ids is None:
        raise ValueError("it must have ids, a text, or messages")
    return np.array(ids, np.int64)
