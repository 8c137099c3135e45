"""Recorded answers decoded again on a simulated clock: what a budget would gain, in seconds.

Drafting, calibration, verifying and learning are the engine's own. Only the model is scripted: it
says what was recorded, and its forward takes what a curve says, with noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from eval.runs.recorded import RecordedText, lessons_of, paths_of, top_of
from selfspec import GenerationStats, SpecConfig, sequence
from selfspec.cost import Budget, Step
from selfspec.draft.memory import Memory
from selfspec.engine import Decoder, first_tokens
from selfspec.records import DraftTree, NoiseAhead
from selfspec.verify.choosers import Said, Text
from selfspec.verify.shortlist import Shortlist
from selfspec.verify.tape import NoiseTape


class Host(NamedTuple):
    """Seconds of a step beside its forward: in every step, to look for drafts, for each node."""

    step: float = 0.3e-3
    looking: float = 0.2e-3
    node: float = 0.04e-3


class Machine:
    """A clock that moves as steps take their time: straight between some widths, with noise."""

    def __init__(self, seconds: Mapping[int, float], host: Host, noise: float, seed: int) -> None:
        self.now = 0.0
        self._seconds, self._host, self._noise = seconds, host, noise
        self._dice = random.Random(seed)

    @property
    def plain(self) -> float:
        """The seconds of a plain step, without noise."""
        return self._seconds[1] + self._host.step

    def look(self) -> None:
        self.now += self._host.looking

    def run(self, width: int) -> None:
        factor = self._dice.lognormvariate(0, self._noise)
        self.now += factor * float(
            np.interp(width, list(self._seconds), list(self._seconds.values()))
        )

    def work(self, width: int) -> None:
        self.now += self._host.step + self._host.node * (width - 1)


class Answer(NamedTuple):
    """What an answer took, and what plain steps would have."""

    task: str
    seconds: float
    plain_seconds: float
    stats: GenerationStats


class _Backend:
    """Runs forwards that only take time."""

    setting_up = 0.0
    num_pending = None

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.trees: Sequence[Any] = ()

    def max_width(self, max_nodes: int) -> int:
        return max_nodes

    def lay_out(self, trees: Sequence[Any]) -> int:
        self.trees = trees
        width = max(len(tree.tokens) for tree in trees)
        self._machine.work(width)
        return width

    def forward(self, width: int) -> torch.Tensor:
        self._machine.run(width)
        return torch.empty(1, width, 1)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        pass

    def keep_rows(self, rows: Sequence[int]) -> None:
        pass


@dataclass
class _Chooser:
    """Chooses what was recorded; the noise of a sampled text is known ahead as in a call."""

    text: RecordedText
    moves_together = False

    def __post_init__(self) -> None:
        seed = self.text.seed
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._tape = None if generator is None else NoiseTape(1, generator)
        self._like = torch.empty(self.text.vocab_size)

    def read(self, said: Said, index: int) -> None:
        pass

    def commit(self, rows: Sequence[Text], nodes: Sequence[int]) -> tuple[list[int], bool]:
        step = rows[0].num_new
        token = self.text.output_ids[step]
        if self._tape is not None:
            self._tape.draw_from(Shortlist([token], [1.0], None), self._like, 0, step)
            self._tape.reach(0, step + 1)
        return [token], rows[0].commit(token)

    def noise_ahead(self, row: Text) -> NoiseAhead | None:
        tape, step = self._tape, row.num_new
        return None if tape is None else lambda depth: tape.ahead(0, step + depth)


class _Fetched:
    """Tables that are there already."""

    def __init__(self, tables: Sequence[Any]) -> None:
        self._tables = tables

    def get(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(table)[None] for table in self._tables)


@dataclass(kw_only=True)
class _Replay(Decoder):
    """The engine: looking takes time, and recorded tables stand in for those of the logits."""

    text: RecordedText
    machine: Machine
    stats: GenerationStats

    def _draft(self, step: Step) -> Any:
        if step.max_nodes > 1:
            self.machine.look()
        return super()._draft(step)

    def _fetch_tops(self, logits: torch.Tensor, memory: Memory) -> Any:
        num_before = self.stats.num_new_tokens
        trees = self.backend.trees or [DraftTree.of_root(0)]  # type: ignore[attr-defined]
        (tree,) = trees
        rows = [self.text.row(num_before, path) for path in paths_of(tree)]
        return _Fetched(top_of(rows, memory.top_k))


def answered(
    text: RecordedText,
    memory: Memory,
    config: SpecConfig,
    machine: Machine,
    new_budget: Callable[[], Budget],
    max_new_tokens: int,
) -> Answer:
    """One text, decoded on the machine's clock, its first token in no time."""
    memory.observe_pairs(*lessons_of(text, memory.top_k))
    length = len(text.prompt_ids) + min(max_new_tokens, len(text.output_ids))
    row = sequence.Sequence(
        prompt=torch.tensor([text.prompt_ids]),
        prompt_ids=text.prompt_ids,
        chooser=_Chooser(text),
        max_length=length,
        stats=GenerationStats(num_calls=1),
    )
    decoder = _Replay(
        backend=_Backend(machine),  # type: ignore[arg-type]
        config=config,
        stats=row.stats,
        budget=new_budget(),
        clock=lambda: machine.now,
        text=text,
        machine=machine,
    )
    first = first_tokens([row], torch.empty(1, 1), decoder.device)
    row.begin(memory, config)
    decoder.add([row], first)
    start = machine.now
    decoder.run()
    num_tokens = length - len(text.prompt_ids) - 1
    return Answer(text.task, machine.now - start, num_tokens * machine.plain, decoder.stats)
