"""`rows.jsonl`: all that a run measured, one JSON object a line, appended and never changed.

Every line has a `kind`:

run      one start of the command, in one process: `schema`, `run` (its name), `settings` (what was
         asked, equal in all runs of a folder), `environment` (versions, hashes, device, git state),
         `num_shards` (processes that shared the questions), `num_asked` (questions of a round),
         `notes`,
         `left_out` (methods that this model or device can't have, with the reason)
answer   one method's answer to one question, or to a batch of them, in one turn:
           run, method, task, questions (their ids), turn (from 0), order (in the order of methods),
           round (from 0: a round is all questions once more, from the same state)
         where it failed: `error`, and no numbers; else `numbers`:
           num_prompt_tokens, num_new_tokens   of all questions of the batch
           seconds, prefill_seconds            of the whole call; to the end of the first forward
           num_steps                           forwards behind the prompt's, once for each question
           num_nodes, num_branch_queries       verified nodes, roots included; what branches asked
           accepted_lengths, widths            drafts accepted, nodes verified -> number of steps
           drafted_by_source, accepted_by_source, stage_seconds
           table_bytes                         what its LUTs take
           disabled_reason                     why it did not draft as asked, if it didn't
           forward, packed_bytes               how forwards were run at its end; copies of weights
           output_sha256                       of the new ids
           same                                identical, near-tie or different; null: not compared
           differs_at, gap_ulps                first other token (from 0), and how near a tie it was
         What stock's own methods don't count, from `num_nodes` on, is null or empty.
text     `questions`, `turn`, `prompt_ids` and `output_ids` of the reference: for `eval simulate`
curve    `seconds` of a forward by its width, on this machine, behind `num_columns` of text

Where a key (questions, turn, method, round) comes twice, the later line counts.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import EvalError

SCHEMA = 1
ROWS = "rows.jsonl"
_SHARDS = "rows.*-of-*.jsonl"
Histogram = dict[int, int]


class Key(NamedTuple):
    """What an answer is filed by."""

    questions: tuple[int | str, ...]
    turn: int
    method: str
    round: int = 0


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What was measured of one answer; the module's docstring says what each one is."""

    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float
    prefill_seconds: float
    num_steps: int
    output_sha256: str
    num_nodes: int | None = None
    num_branch_queries: int | None = None
    accepted_lengths: Histogram = field(default_factory=dict)
    widths: Histogram = field(default_factory=dict)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    table_bytes: int | None = None
    disabled_reason: str | None = None
    forward: str | None = None
    packed_bytes: int | None = None
    same: str | None = None
    differs_at: int | None = None
    gap_ulps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One method's answer: numbers, or the error in their place."""

    run: str
    method: str
    task: str
    questions: tuple[int | str, ...]
    turn: int
    order: int
    round: int = 0
    error: str | None = None
    numbers: Numbers | None = None

    @property
    def key(self) -> Key:
        return Key(self.questions, self.turn, self.method, self.round)

    def as_line(self) -> dict[str, Any]:
        """What is written; of `error` and `numbers` only the one that there is."""
        values = {"kind": "answer", **asdict(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> Answer:
        """Back from `as_line` and from JSON, where numbers as keys are texts."""
        values = {each.name: line[each.name] for each in fields(cls) if each.name in line}
        if "numbers" in values:
            numbers = dict(values["numbers"])
            for name in ("accepted_lengths", "widths"):
                numbers[name] = {int(key): count for key, count in numbers[name].items()}
            values["numbers"] = Numbers(**numbers)
        return cls(**{**values, "questions": tuple(line["questions"])})


@dataclass
class Record:
    """All lines of a folder, the later ones in place of earlier ones with the same key."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[Key, Answer] = field(default_factory=dict)
    texts: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    curve: dict[str, Any] | None = None

    def take(self, line: Mapping[str, Any]) -> None:
        """Files a line by its kind; a kind that nobody knows yet is passed over."""
        kind = line["kind"]
        if kind == "run":
            _check_schema(line["schema"])
            self.runs.append(dict(line))
        elif kind == "answer":
            answer = Answer.from_line(line)
            self.answers[answer.key] = answer
        elif kind == "text":
            key = (*line["questions"], line["turn"])
            self.texts[key] = dict(line)
        elif kind == "curve":
            self.curve = dict(line)

    def lines(self) -> Iterable[dict[str, Any]]:
        """What a file that holds it all would say."""
        yield from self.runs
        yield from (answer.as_line() for answer in self.answers.values())
        yield from self.texts.values()
        yield from [] if self.curve is None else [self.curve]


class RowFile:
    """A file that lines are appended to, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_torn_line(path)
        except OSError as error:
            raise _unwritable(path, error) from error

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Writes lines at once; where there is no room for all, none of them stays."""
        data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab", buffering=0) as file:
                written = 0
                while written < len(data):
                    written += file.write(data[written:]) or 0
        except OSError as error:
            with self.path.open("rb+") as file:
                file.truncate(size)
            raise _unwritable(self.path, error) from error


def shard_path(folder: Path, shard: int, num_shards: int) -> Path:
    """Where a process writes: one file each, so that no two share one."""
    return folder / (ROWS if num_shards == 1 else f"rows.{shard}-of-{num_shards}.jsonl")


def read_record(source: Path) -> Record:
    """All that is known in a folder, or in a file; a last line that a kill tore is passed over."""
    record = Record()
    paths = [source / ROWS, *sorted(source.glob(_SHARDS))] if source.is_dir() else [source]
    for path in paths:
        for number, line in enumerate(_whole_lines(path), start=1):
            try:
                record.take(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                if isinstance(error, EvalError):
                    raise
                raise EvalError(
                    f"{path} line {number} must be a line of a run (got {line[:60]!r}: {error!r}); "
                    "take it out, and what it held is measured anew"
                ) from error
    return record


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _drop_torn_line(path: Path) -> None:
    """Cuts off what stands behind the last end of a line."""
    data = path.read_bytes() if path.exists() else b""
    if not data.endswith(b"\n") and data:
        with path.open("rb+") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _check_schema(schema: int) -> None:
    if schema > SCHEMA:
        raise EvalError(
            f"schema must be <= {SCHEMA} (got {schema}): a newer selfspec wrote this; update"
        )


def _unwritable(path: Path, error: OSError) -> EvalError:
    fix = "choose another --output"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "make room and run the same command again: what is done stays done"
    return EvalError(f"{path} must be writable ({error.strerror}); {fix}")
