"""A file of prompts, as `tune` and `check` read it: in the forms of `batch`, or with turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfspec.cli.batch.batch_lines import read_line
from selfspec.errors import CliError


def read_prompts(path: Path, option: str) -> list[Any]:
    """The prompts of a file: texts, or lists of messages. Of several turns the first counts."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CliError(
            f"{option} must be readable (got {str(path)!r}: {error.strerror})"
        ) from error
    prompts = [
        _prompt(number, line, option) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        raise CliError(f"{option} must have a prompt at least (got {str(path)!r}, which is empty)")
    return prompts


def encoded_prompts(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """The ids of all prompts."""
    from selfspec.batch.prompts import encoded

    return [encoded(_as_asked(prompt, tokenizer), tokenizer) for prompt in prompts]


def _as_asked(prompt: Any, tokenizer: Any) -> Any:
    """A question, which was read as a tuple, as a chat model is asked it, or any other as text."""
    if not isinstance(prompt, tuple):
        return prompt
    return [{"role": "user", "content": prompt[0]}] if tokenizer.chat_template else prompt[0]


def _prompt(number: int, line: bytes, option: str) -> Any:
    try:
        value = json.loads(line)
        turns = value.get("turns") if isinstance(value, dict) else None
        if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]:
            return tuple(turns[:1])
        return read_line(number, line).prompt
    except (CliError, RecursionError, ValueError) as error:
        raise CliError(f"{option}, line {number}: {error}") from error
