"""How the next token is chosen and committed: for one row alone, or for a whole batch.

Knows logits, processors and stopping rules as tensors and callables; nothing of trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from selfspec.machine.device import CpuDevice, Device, Fetched
from selfspec.records import NoiseAhead
from selfspec.verify.logits import as_read, likeliest
from selfspec.verify.shortlist import Warpers, shortlist
from selfspec.verify.tape import NoiseTape
from selfspec.verify.transcript import RowStops, Transcript

__all__ = [
    "BatchChooser",
    "Chooser",
    "GreedyChooser",
    "ProcessedChooser",
    "Processing",
    "Processors",
    "Visit",
]

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Visit(NamedTuple):
    """A node that a walk has reached."""

    row: int  # The row's number in the transcript.
    forward_index: int  # Its index in the forward, which rows that stopped may have left.
    node: int


class Chooser(Protocol):
    """Chooses tokens out of a step's logits."""

    @property
    def moves_together(self) -> bool:
        """Must all rows get their next token at once? Else each row is asked for alone."""
        ...

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step; waits for nothing."""
        ...

    def commit(self, visits: Sequence[Visit], transcript: Transcript) -> tuple[list[int], bool]:
        """Commits the next token of each row that is visited; have all of them stopped now?"""
        ...

    def forget_before(self, step: int) -> None:
        """Frees what was kept for steps that every row has behind it."""
        ...

    def noise_ahead(self, row: int, transcript: Transcript) -> NoiseAhead | None:
        """The noise that a row's next tokens will be drawn with; None where it is not known."""
        ...


class _RowChooser:
    """Chooses for one row at a time, which stops by rules that look at it alone."""

    moves_together = False

    def __init__(self, stops: RowStops) -> None:
        self._stops = stops

    def commit(self, visits: Sequence[Visit], transcript: Transcript) -> tuple[list[int], bool]:
        """Commits the next token of the one row that is visited."""
        (visit,) = visits
        token = self.choose(visit, transcript)
        return [token], transcript.commit(visit.row, token, self._stops)

    def choose(self, visit: Visit, transcript: Transcript) -> int:
        """The token behind a node."""
        raise NotImplementedError

    def forget_before(self, step: int) -> None:
        """There is nothing to free."""

    def noise_ahead(self, row: int, transcript: Transcript) -> NoiseAhead | None:
        """None: nothing is drawn."""
        return None


class GreedyChooser(_RowChooser):
    """Greedy decoding with no processors: one batched argmax and one sync for a step.

    On a CPU, where nothing has to be waited for, only at the nodes that are visited.
    """

    def __init__(self, stops: RowStops, device: Device | None = None) -> None:
        super().__init__(stops)
        self._device = device or CpuDevice()
        self._fetched: Fetched | None = None
        self._choices: list[list[int]] = []
        self._here: torch.Tensor | None = None  # Logits that a CPU can read.

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step; waits for nothing."""
        if isinstance(self._device, CpuDevice) and logits.device.type == "cpu":
            self._here = logits
        else:
            self._fetched = self._device.fetch(likeliest(logits))

    def choose(self, visit: Visit, transcript: Transcript) -> int:
        """The likeliest token behind a node."""
        if self._here is not None:
            return int(as_read(self._here[visit.forward_index, visit.node]).numpy().argmax())
        if self._fetched is not None:
            (choices,) = self._fetched.get()
            self._fetched, self._choices = None, choices.tolist()
        return self._choices[visit.forward_index][visit.node]


def _unchanged(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


class Processing(NamedTuple):
    """A row's processors: the first ones, and the last ones, which may be known as `warpers`.

    The last ones never look at the prefix.
    """

    first: Processors | None
    last: Processors = _unchanged
    warpers: Warpers | None = None


class ProcessedChooser(_RowChooser):
    """Processors and sampling, only at visited nodes, each with its true prefix.

    Each visit makes the CPU wait for a GPU.
    """

    def __init__(self, stops: RowStops, rows: Sequence[Processing], tape: NoiseTape | None) -> None:
        """One `Processing` for each row; without a tape of noise the choice is greedy."""
        super().__init__(stops)
        self._rows = rows
        self._tape = tape
        self._logits = torch.empty(0, device="cpu")

    def forget_before(self, step: int) -> None:
        """Frees the noise of steps that every row has behind it."""
        if self._tape is not None:
            self._tape.forget_before(step)

    def noise_ahead(self, row: int, transcript: Transcript) -> NoiseAhead | None:
        """The noise behind the next token, and behind drafts of any depth, where it is known."""
        tape, step = self._tape, transcript.num_new(row)
        return None if tape is None else lambda depth: tape.ahead(row, step + depth)

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step."""
        self._logits = logits

    def choose(self, visit: Visit, transcript: Transcript) -> int:
        """The token behind a node, drawn with the noise of its step if the call samples."""
        row, index, node = visit
        first, last, warpers = self._rows[row]
        step = transcript.num_new(row)
        scores = self._logits[index, node : node + 1]
        # Only a processor that is not known may write to the scores, and needs a copy.
        scores = scores.to(transcript.device, torch.float32, copy=first is not None)
        if first is not None:
            scores = first(transcript.prefix(row), scores)
        if self._tape is None:
            return int(last(transcript.prefix(row), scores).argmax(-1))
        token = self._drawn_from_few(self._tape, scores[0], warpers, row, step)
        if token is None:
            token = self._tape.draw(last(transcript.prefix(row), scores)[0], row, step)
        return token

    @staticmethod
    def _drawn_from_few(
        tape: NoiseTape, scores: torch.Tensor, warpers: Warpers | None, row: int, step: int
    ) -> int | None:
        """The token that is drawn of those that the warpers leave; None if only they can tell."""
        if warpers is None or scores.device.type != "cpu" or scores.dtype != torch.float32:
            return None
        few = shortlist(scores, warpers)
        return few and tape.draw_from(few, scores, row, step)


@dataclass
class BatchChooser:
    """The body of stock's loop without its forward, for all rows at once.

    For processors and criteria that may look at the whole batch or count their calls, for
    recorded scores, for a KV cache that is handed back, and for chains. Rows that stopped go on
    with the pad token, as in stock.
    """

    processors: Processors
    criteria: Callable[..., torch.Tensor]
    do_sample: bool
    keeps_scores: bool = False
    keeps_logits: bool = False
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    moves_together = True

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step."""
        self._logits = logits

    def commit(self, visits: Sequence[Visit], transcript: Transcript) -> tuple[list[int], bool]:
        """Commits one token to every row, with one call of the processors and the criteria."""
        prefixes = transcript.prefixes()
        picked = self._logits[
            [visit.forward_index for visit in visits], [visit.node for visit in visits]
        ]
        picked = picked.to(prefixes.device, torch.float32, copy=True)
        scores = self.processors(prefixes, picked)
        if self.keeps_scores:
            self.scores.append(scores)
        if self.keeps_logits:
            self.logits.append(picked)
        if self.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        kept = tuple(self.scores) if self.keeps_scores else None
        committed = transcript.commit_all(tokens, self.criteria, kept)
        return committed, transcript.all_done

    def forget_before(self, step: int) -> None:
        """There is nothing to free: what is kept is handed to the caller."""

    def noise_ahead(self, row: int, transcript: Transcript) -> NoiseAhead | None:
        """None: the noise of a batch that moves together is drawn by torch itself."""
        return None
