"""Lines of a batch file in, lines of the output out: one model that answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from selfspec.cli.batch.batch_lines import Line, read_line
from selfspec.cli.shared.options import WriteOptions
from selfspec.cli.shared.writer import loaded, memory_of_texts
from selfspec.config import SpecConfig
from selfspec.errors import SelfSpecError, one_line

if TYPE_CHECKING:
    from selfspec.batch.session import Session
    from selfspec.cli.shared.writer import Writer


class Outcome(NamedTuple):
    """What came of a line: what is written of its answer, or why there is none."""

    number: int
    answer: str | None
    error: str | None
    num_tokens: int = 0


# Takes numbered lines, and gives the outcome of each as soon as it is known.
Answers = Callable[[Iterable[tuple[int, bytes]]], Iterator[Outcome]]


@dataclass(frozen=True)
class Answerer:
    """All that decides about answers."""

    asked: WriteOptions
    config: SpecConfig
    max_rows: int

    @contextmanager
    def alone(self) -> Iterator[Answers]:
        """Answers in this process."""
        with self._batch() as batch:
            yield batch.answers

    @contextmanager
    def _batch(self) -> Iterator[_Batch]:
        with loaded(self.asked, num_texts=self.max_rows) as writer:
            from selfspec.batch.schedule import ShortestFirst
            from selfspec.batch.session import Session

            spec = writer.new_spec(self.config)
            small, most = writer.start.draft_model, self.asked.max_memory
            session = Session(
                writer.model,
                writer.tokenizer,
                spec,
                max_rows=self.max_rows,
                max_memory=memory_of_texts(writer.model, small, most, self.max_rows),
                scheduler=ShortestFirst(),  # Nobody waits for a certain line of a file.
            )
            yield _Batch(writer, session, spec)


class _Batch:
    """One model, and the lines that wait or are being answered."""

    def __init__(self, writer: Writer, session: Session, spec: Any) -> None:
        self.spec = spec
        self._writer = writer
        self._session = session
        self._asked: dict[int, Line] = {}

    def answers(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[Outcome]:
        """The outcomes of all lines, as they are known."""
        left = iter(lines)
        while True:
            fresh = list(islice(left, self._session.num_wanted))
            if not fresh and self._session.is_empty:
                return
            yield from (outcome for _, outcome in self.work(fresh))

    def work(self, fresh: list[tuple[int, bytes]]) -> list[tuple[int, Outcome]]:
        """Takes more lines; returns the next outcomes."""
        outcomes = [each for line in fresh if (each := self._ask(*line)) is not None]
        for answer in self._session.work():
            line = self._asked.pop(answer.index)
            written = line.answered(answer, self._writer.loaded.name)
            outcomes.append(Outcome(line.number, written, None, len(answer.ids)))
        return [(outcome.number, outcome) for outcome in outcomes]

    def _ask(self, number: int, data: bytes) -> Outcome | None:
        """Lets a line wait for its answer, or says why there will be none."""
        try:
            line = read_line(number, data)
            self._submit(line)
        except (SelfSpecError, RecursionError, TypeError, ValueError) as error:
            return Outcome(number, None, one_line(error))
        self._asked[number] = line
        return None

    def _submit(self, line: Line) -> None:
        from selfspec.batch.prompts import encoded

        ids = encoded(line.prompt, self._writer.tokenizer)
        arguments = {
            "max_new_tokens": self._writer.max_new_tokens,
            **self._writer.choice(),
            **line.arguments,
        }
        self._writer.loaded.check_length(
            len(ids), arguments["max_new_tokens"], setting=line.length_setting
        )
        seed = self._writer.seed + line.number - 1 if line.seed is None else line.seed
        self._session.submit(line.number, ids, seed, arguments)
