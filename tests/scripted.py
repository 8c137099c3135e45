"""A model whose next token is a fixed function of its prefix, the backend that runs it over trees,
and drafters that know it too well or not at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch

from selfspec import row as rows_
from selfspec.config import SpecConfig
from selfspec.cost import Budget, CostCurve, Ledger
from selfspec.draft.calibration import Calibration
from selfspec.draft.drafter import Drafter
from selfspec.draft.memory import DraftMemory
from selfspec.draft.shape import Shape
from selfspec.draft.sources import Cursor, RowStart, Source
from selfspec.drafts import walked
from selfspec.engine import Engine
from selfspec.machine.device import Device
from selfspec.records import Candidate, DraftTree, Evidence, StepRecord
from selfspec.row import Stops, output_of
from selfspec.stats import GenerationStats
from selfspec.verify.choosers import (
    BatchChooser,
    Chooser,
    GreedyChooser,
    ProcessedChooser,
    Processing,
    StepLogits,
)
from selfspec.verify.tape import NoiseTape
from tests.strategies import check_tree

VOCAB, PAD, EOS = 7, 0, 6
LEARNING = {True: "session", False: "frozen"}
Prefix = tuple[int, ...]


class ScriptedModel:
    """Logits are a pseudo-random permutation that depends on the last `order` tokens."""

    def __init__(self, seed: int, order: int = 2) -> None:
        self._seed = seed
        self._order = order
        self.logits = cache(self._logits)

    def _logits(self, prefix: Prefix) -> torch.Tensor:
        dice = random.Random(f"{self._seed} {prefix[-self._order :]}")
        return torch.tensor(dice.sample(range(VOCAB), VOCAB)) / 2

    def next_token(self, prefix: Prefix) -> int:
        return int(self.logits(prefix).argmax())


class ScriptedBackend:
    """Keeps each row's text where a real one keeps its KV, and checks what it is given."""

    setting_up = 0.0
    chains_only = False
    shows_states = False
    forward_name = "eager"

    def __init__(self, model: ScriptedModel, prompts: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.texts: list[Prefix] = [tuple(prompt) for prompt in prompts]
        self.kv = self  # Rows hold their index among all.
        self.live = list(range(len(prompts)))
        self.kept: list[list[int]] = []
        self.widths: list[int] = []
        self.max_widths: Iterable[int] = ()  # of the coming forwards, where they are limited
        self._trees: list[DraftTree] = []

    @property
    def tree_start(self) -> int:
        return max(map(len, self.texts))

    def prompt_logits(self) -> torch.Tensor:
        """(B, V): what the prompt's own forward yields."""
        return torch.stack([self.model.logits(text) for text in self.texts])

    def max_width(self, max_nodes: int) -> int:
        return min(max_nodes, next(iter(self.max_widths), max_nodes))

    def lay_out(
        self, rows: Sequence[Any], trees: Sequence[DraftTree]
    ) -> Callable[[], torch.Tensor]:
        assert [row.index for row in rows] == self.live
        assert len(trees) == len(self.texts)
        for tree in trees:
            check_tree(tree)
        self._trees = list(trees)
        self.widths.append(max(len(tree.tokens) for tree in trees))
        return partial(self.run, self._trees)

    def run(self, layout: list[DraftTree]) -> torch.Tensor:
        width = max(len(tree.tokens) for tree in layout)
        rows = []
        for tree, text in zip(layout, self.texts, strict=True):
            nodes = [self.model.logits(text + path) for path in paths_to_nodes(tree)]
            rows.append(torch.stack(nodes + nodes[:1] * (width - len(nodes))))
        return torch.stack(rows)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        for row, (tree, path) in enumerate(zip(self._trees, paths, strict=True)):
            assert [tree.parents[node] for node in path] == [-1, *path[:-1]]
            self.texts[row] += tuple(tree.tokens[node] for node in path)

    def wipe(self, rows: Sequence[int]) -> None:
        """Its logits are never NaN."""
        assert not rows

    def keep_rows(self, rows: Sequence[Any]) -> None:
        kept = [self.live.index(row.index) for row in rows]
        self.kept.append(kept)
        self.texts, self.live = [self.texts[index] for index in kept], [row.index for row in rows]


class ScriptedRunner:
    """Runs a scripted model."""

    def __init__(self, config: SpecConfig, curve: Callable[[ScriptedBackend], CostCurve]) -> None:
        self.config, self.ledger, self.model, self.costs = config, Ledger(), None, self
        self._curve = curve

    def sources(self, top_k: int) -> list[Source]:
        return []

    def curve(self, model: None, backend: Any, num_rows: int) -> CostCurve:
        return self._curve(backend)


def paths_to_nodes(tree: DraftTree) -> list[Prefix]:
    """The tokens from the root down to each node."""
    paths: list[Prefix] = [(tree.tokens[0],)]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def unchanged(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The processor that does nothing."""
    return scores


class TextSource(Source):
    """Opens cursors that stand in the text itself; `next_tokens` is what they draft."""

    def __init__(self, name: str, next_tokens: Any) -> None:
        self.name = name
        self.next_tokens = next_tokens

    def open(self, row: RowStart) -> TextCursor:
        return TextCursor(self, tuple(row.prompt_ids))

    def evidence(self, rank: int) -> Evidence:
        return Evidence(self.name, rank=rank)


class TextCursor(Cursor):
    """A row's text so far, or that text with drafts behind it."""

    def __init__(self, source: TextSource, text: Prefix) -> None:
        self._source = source
        self._text = text

    def root(self) -> Prefix:
        return self._text

    def expand(self, state: Prefix) -> list[Candidate]:
        tokens = self._source.next_tokens(state)
        return [(token, self._source.evidence(rank)) for rank, token in enumerate(tokens, start=1)]

    def follow(self, state: Prefix, token: int) -> Prefix:
        return (*state, token)

    def observe(self, record: StepRecord) -> None:
        self._text += tuple(record.committed_ids)


def omniscient(model: ScriptedModel) -> TextSource:
    """Names the truth and nothing else."""
    return TextSource("truth", lambda text: [model.next_token(text)])


def doubtful(model: ScriptedModel) -> TextSource:
    """Names the truth second, behind something wrong."""
    return TextSource(
        "doubt", lambda text: [(model.next_token(text) + 1) % VOCAB, model.next_token(text)]
    )


def hostile(model: ScriptedModel) -> TextSource:
    """Names everything but the truth."""
    everything = range(VOCAB)
    return TextSource("lies", lambda text: [t for t in everything if t != model.next_token(text)])


def wild(seed: int) -> TextSource:
    """Names some tokens or none, anew each time it is asked."""
    dice = random.Random(seed)
    return TextSource("wild", lambda text: dice.sample(range(VOCAB), dice.randrange(4)))


@dataclass
class Run:
    """One call to decode: what it is asked, and afterwards what came of it."""

    model: ScriptedModel
    prompts: list[list[int]]
    sources: Sequence[Source]
    max_length: int = 20
    eos: int | None = None
    config: SpecConfig = SpecConfig(max_nodes=6)  # noqa: RUF009 frozen
    learns: bool = True
    device: Device = Device()  # noqa: RUF009 has no state
    budget: Budget = Budget()  # noqa: RUF009 has no state
    shape: Shape = Shape()  # noqa: RUF009 has no state
    clock: Callable[[], float] = perf_counter
    curve: Callable[[ScriptedBackend], CostCurve] = lambda _backend: CostCurve.unknown(1.0)

    def __post_init__(self) -> None:
        self.backend = ScriptedBackend(self.model, self.prompts)
        self.stats = GenerationStats()
        self.records: list[StepRecord] = []
        self.learned = DraftMemory(
            list(self.sources), Calibration(), top_k=3, learns=self.learns, shape=self.shape
        )
        self.rows = [
            rows_.Row(
                index=index,
                prompt=torch.tensor([prompt]),
                prompt_ids=prompt,
                max_length=self.max_length,
                stops=Stops() if self.eos is None else Stops(frozenset({self.eos})),
                pad_token_id=PAD,
                gets_pads=self.eos is not None,
                stats=self.stats,
                drafter=Drafter(self.learned, RowStart(prompt_ids=prompt), self.config),
            )
            for index, prompt in enumerate(self.prompts)
        ]

    def greedy(self) -> list[Chooser]:
        return [GreedyChooser() for _ in self.rows]

    def processed(self, tape: NoiseTape | None = None) -> list[Chooser]:
        return [ProcessedChooser(Processing(unchanged), tape, row.index) for row in self.rows]

    def together(self, **changes: Any) -> list[Chooser]:
        arguments = {"processors": unchanged, "criteria": self.criteria, "do_sample": False}
        return [BatchChooser(torch.tensor(self.prompts), **(arguments | changes))] * len(self.rows)

    def criteria(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        ended = (
            torch.zeros(len(ids), dtype=torch.bool) if self.eos is None else ids[:, -1] == self.eos
        )
        return ended | (ids.shape[1] >= self.max_length)

    def decode(self, choosers: list[Any] | None = None) -> list[list[int]]:
        for row, chooser in zip(self.rows, choosers or self.greedy(), strict=True):
            row.chooser, row.may_leave = chooser, not chooser.moves_together
        logits = StepLogits(self.backend.prompt_logits()[:, None], self.device)
        records = walked(self.rows, logits, of_prompt=True)
        engine = Engine(
            ScriptedRunner(
                self.config.changed(learning=LEARNING[self.learns], top_k=3), self.curve
            ),
            self.backend,
            learned=lambda _vocab_size: self.learned,
            budget=self.budget,
            device=self.device,
            on_step=[self.records.append],
            clock=self.clock,
        )
        engine.add(self.rows, records, logits)
        while not all(row.is_done for row in self.rows):
            engine.leave()
            engine.step()
        return output_of(self.rows).tolist()
