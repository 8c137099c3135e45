"""`rows.jsonl`: all that a run measured, one JSON object a line, appended and never changed.

Every line has a `kind`:

run      one start of the command: `schema`, `run` (its name), `settings` (what was asked, equal in
         all runs of a folder), `environment` (versions, device, git state), `num_asked` (questions
         of a round), `notes`,
         `left_out` (methods that this model or device can't have, with the reason)
answer   one method's answer to one question in one turn:
           run, method, task, question (its id), turn (from 0), order (of methods),
           round (from 0: a round is all questions once more, from the same state)
         where it failed: `error`, and no numbers; else `numbers`:
           num_prompt_tokens, num_new_tokens
           seconds, prefill_seconds            of the whole call; to the end of the first forward
           processor_share                     of a CPU, what other programs left just before
           num_steps                           forwards after the prompt's
           num_nodes                           verified nodes, roots included
           accepted_lengths, widths            drafts accepted, nodes verified -> number of steps
           drafted_by_source, accepted_by_source, stage_seconds
           table_bytes                         what its LUTs and its texts take
           disabled_reason                     why it did not draft in trees, if it didn't
           forward                             how forwards were run at its end
           output_sha256                       of the new ids
           same                                identical, near-tie or different; null: not compared
           differs_at, gap_ulps                first other token (from 0), and how near a tie it was
         What stock's own methods don't count, from `num_nodes` on, is null or empty.
text     `question`, `turn`, `prompt_ids` and `output_ids` of the reference: for `eval replay`
curve    `seconds` of a forward by its width, on this machine, after `num_columns` of text

Where a key (question, turn, method, round) comes twice, the later line counts. A line that a kill
tore is passed over, so its question is answered again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from eval.errors import EvalError

SCHEMA = 2
ROWS = "rows.jsonl"
HISTOGRAMS = ("accepted_lengths", "widths")
COUNTS = (*HISTOGRAMS, "drafted_by_source", "accepted_by_source", "stage_seconds")
NUMBERS = (
    *("num_prompt_tokens", "num_new_tokens", "seconds", "prefill_seconds", "num_steps"),
    *("num_nodes", "table_bytes", "gap_ulps", "processor_share"),
)
_TEXTS = ("disabled_reason", "forward", "output_sha256", "same", "differs_at")
_ABOUT = ("run", "method", "task", "question", "turn", "order", "round", "error")

Line = dict[str, Any]


class Key(NamedTuple):
    """What an answer is filed by."""

    question: int | str
    turn: int
    method: str
    round: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Key:
        return cls(*(line[name] for name in cls._fields))


@dataclass
class Record:
    """All lines of a run, the later ones in place of earlier ones with the same key."""

    runs: list[Line] = field(default_factory=list)
    answers: dict[Key, Line] = field(default_factory=dict)
    texts: dict[tuple[Any, ...], Line] = field(default_factory=dict)
    curve: Line | None = None

    def take(self, line: Line) -> None:
        """Files a line by its kind; an unknown kind is passed over."""
        kind = line["kind"]
        if kind == "run":
            if line["schema"] != SCHEMA:
                raise KeyError("schema")
            self.runs.append(line)
        elif kind == "answer":
            self.answers[Key.of(line)] = line
        elif kind == "text":
            self.texts[line["question"], line["turn"]] = line
        elif kind == "curve":
            self.curve = line

    @property
    def frame(self) -> pd.DataFrame:
        return frame_of(self.answers.values())


def frame_of(lines: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each answer: what it is filed by, and its numbers, NaN where it failed."""
    rows = [{**line, **_numbers(line)} for line in lines]
    frame = pd.DataFrame(rows, columns=[*_ABOUT, *NUMBERS, *COUNTS, *_TEXTS])
    return frame.astype({"question": str, **dict.fromkeys(NUMBERS, float)})


def _numbers(line: Mapping[str, Any]) -> Line:
    """JSON has no numbers as keys."""
    numbers = {**{name: {} for name in COUNTS}, **line.get("numbers", {})}
    whole = {name: {int(k): n for k, n in numbers[name].items()} for name in HISTOGRAMS}
    return {**numbers, **whole}


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes lines after those that are there, and after a torn one on a line of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            data = b"\n" * (file.read() != b"\n") + data
        file.write(data)


def read_record(source: Path) -> Record:
    """All that is known in a folder, or in a file."""
    record, path = Record(), source / ROWS if source.is_dir() else source
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        try:
            record.take(line)
        except (KeyError, TypeError) as error:
            rule = f"must be the rows of a run, of schema {SCHEMA}"
            raise EvalError(f"{path} {rule} (got {text[:60]!r})") from error
    return record


def read_answers(source: Path) -> Record:
    """The same of a run that has answers."""
    record = read_record(source)
    if not record.runs or not record.answers:
        raise EvalError(
            f"{source} must be the --output of a run, with answers in {ROWS} (got none)"
        )
    return record
