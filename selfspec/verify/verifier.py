"""How the rows of a batch move: each at its own pace, or all together as in stock's loop.

Chooses each visited node's next token and commits it. Knows logits and processors as tensors and
callables; not where logits come from, nor what becomes of the KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from selfspec.config import SpecConfig
from selfspec.cost import Budget
from selfspec.draft.memory import Memory
from selfspec.draft.sources import Cursor
from selfspec.draft.sources.branches import Branches
from selfspec.draft.tree import TreeGrower
from selfspec.machine.device import CpuDevice, Device, Fetched
from selfspec.records import DraftTree, Queries, StepRecord, TopK
from selfspec.verify.logits import as_read, likeliest
from selfspec.verify.noise import NoiseTape
from selfspec.verify.shortlist import Warpers, shortlist
from selfspec.verify.transcript import RowStops, Transcript
from selfspec.verify.walk import walk

__all__ = ["GreedyChooser", "Lockstep", "OwnPace", "ProcessedChooser", "Processing", "Row"]

Processors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _as_they_are(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


class Processing(NamedTuple):
    """A row's processors: the first ones, and the last ones, which may be known as `warpers`."""

    first: Processors | None
    last: Processors = _as_they_are
    warpers: Warpers | None = None


@dataclass
class Row:
    """One sequence of the batch while it is being decoded."""

    index: int
    last_token: int
    cursors: list[Cursor]
    grower: TreeGrower
    branches: Branches

    @classmethod
    def open(cls, index: int, token_ids: list[int], memory: Memory, config: SpecConfig) -> Row:
        """A row behind its prompt, whose padding was taken off."""
        cursors = [source.open(token_ids, learns=memory.learns) for source in memory.sources]
        grower = TreeGrower(cursors, config, memory.calibration.probability)
        num_branches = config.num_branches if memory.learns else 0
        branches = Branches(token_ids, num_branches, config.branch_length)
        return cls(index, token_ids[-1] if token_ids else 0, cursors, grower, branches)

    def draft(
        self, max_nodes: int, transcript: Transcript, pays: Callable[[float], bool] | None
    ) -> DraftTree:
        """A tree that is no deeper than the text may still grow."""
        depth = transcript.max_depth(self.index)
        return self.grower.grow(self.last_token, max_nodes, depth, pays)

    def num_branch_queries(self, transcript: Transcript) -> int:
        """How many tokens of branches would ride along."""
        if transcript.done[self.index]:
            return 0
        return self.branches.num_queries(transcript.max_depth(self.index))

    def queries(self, tree: DraftTree, transcript: Transcript) -> DraftTree | Queries:
        """The tree, with what the branches ask beside it."""
        if not self.num_branch_queries(transcript):
            return tree
        return self.branches.ride(tree, transcript.max_depth(self.index))

    def take_branches(self, record: StepRecord, tops: TopK, place: int, memory: Memory) -> None:
        """Lets the sources see what the model said behind the branches' tokens, in a batch's tops.

        It is what the model says there, as true as in the tree: the LUTs learn it all.
        """
        if not self.branches.tokens:
            return
        record.num_from_branches = self.branches.num_foreseen(record)
        pairs = self.branches.pairs(record.tree.tokens[0])
        if not pairs:
            return
        first = len(record.tree)
        top = tops.at((place, slice(first, first + len(pairs))))
        memory.observe_places(np.array(pairs, np.int64), top)
        record.num_branch_queries = len(pairs)
        record.grams = self.branches.take(top.ids[:, 0].tolist())

    def observe(self, record: StepRecord) -> None:
        """Moves behind the committed tokens and lets every cursor learn."""
        self.last_token = record.committed_ids[-1]
        for cursor in self.cursors:
            cursor.observe(record)


class GreedyChooser:
    """Greedy decoding with no processors: one batched argmax and one sync for a step.

    On a CPU, where nothing has to be waited for, only at the nodes that are visited.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or CpuDevice()
        self._fetched: Fetched | None = None
        self._choices: list[list[int]] = []
        self._here: torch.Tensor | None = None  # logits that a CPU can read

    def forget_before(self, step: int) -> None:
        """Nothing to free."""

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step; waits for nothing."""
        if isinstance(self._device, CpuDevice) and logits.device.type == "cpu":
            self._here = logits
        else:
            self._fetched = self._device.fetch(likeliest(logits))

    def choose(self, place: int, node: int, row: int, transcript: Transcript) -> int:
        """The token behind a node of the tree at `place` in the forward."""
        if self._here is not None:
            return int(as_read(self._here[place, node]).numpy().argmax())
        if self._fetched is not None:
            (choices,) = self._fetched.get()
            self._fetched, self._choices = None, choices.tolist()
        return self._choices[place][node]


class ProcessedChooser:
    """Processors and sampling, only at visited nodes, each with its true prefix."""

    def __init__(self, rows: Sequence[Processing], tape: NoiseTape | None) -> None:
        self._rows = rows
        self._tape = tape  # None: greedy
        self._logits = torch.empty(0)

    def forget_before(self, step: int) -> None:
        """Frees the noise of steps that every row has behind it."""
        if self._tape is not None:
            self._tape.forget_before(step)

    def read(self, logits: torch.Tensor) -> None:
        """Takes the logits (B, Q, V) of a step."""
        self._logits = logits

    def choose(self, place: int, node: int, row: int, transcript: Transcript) -> int:
        """The token behind a node, drawn with the noise of its step where sampling is asked."""
        first, last, warpers = self._rows[row]
        scores = self._logits[place, node : node + 1]
        # where no unknown processor may write to it, it need not be a copy
        scores = scores.to(transcript.device, torch.float32, copy=first is not None)
        if first is not None:
            scores = first(transcript.prefix(row), scores)
        step = transcript.num_new(row)
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
        """Where a CPU can tell so what the warpers leave, and which of it is drawn."""
        if warpers is None or scores.device.type != "cpu" or scores.dtype != torch.float32:
            return None
        few = shortlist(scores, warpers)
        return few and tape.draw_from(few, scores, row, step)


class OwnPace:
    """Rows walk their trees independently; rows that stop leave the batch."""

    drops_rows = True

    def __init__(self, chooser: GreedyChooser | ProcessedChooser, stops: RowStops) -> None:
        self._chooser = chooser
        self._stops = stops

    def draft(
        self, rows: Sequence[Row], max_nodes: int, transcript: Transcript, budget: Budget
    ) -> list[DraftTree]:
        """One tree for each row still there."""
        trees = [row.draft(max_nodes, transcript, budget.search(max_nodes)) for row in rows]
        budget.fit(trees, max_nodes)
        return trees

    def read(self, logits: torch.Tensor) -> None:
        """Asks for what the walks need of a step's logits (B, Q, V)."""
        self._chooser.read(logits)

    def verify(
        self,
        rows: Sequence[Row],
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        transcript: Transcript,
    ) -> list[StepRecord]:
        """Walks each tree to where its row falls off or stops; the logits were read before."""
        records = [
            self._verify_row(place, row, tree, transcript)
            for place, (row, tree) in enumerate(zip(rows, trees, strict=True))
        ]
        self._chooser.forget_before(min(transcript.num_new(row.index) for row in rows))
        return records

    def _verify_row(
        self, place: int, row: Row, tree: DraftTree, transcript: Transcript
    ) -> StepRecord:
        committed: list[int] = []

        def commit(node: int) -> tuple[int, bool]:
            token = self._chooser.choose(place, node, row.index, transcript)
            committed.append(token)
            return token, transcript.commit(row.index, token, self._stops)

        path = walk(tree, commit)
        return StepRecord(row=row.index, tree=tree, path=path, committed_ids=committed)


@dataclass
class Lockstep:
    """All rows move together, token by token, exactly as stock's loop with its forward left out.

    For processors and criteria that may look at the whole batch or count their calls, for
    recorded scores, for a KV cache that is handed back, and for chains. A step ends where the
    first row falls off its tree. Rows that stopped go on with the pad token, as in stock.
    """

    processors: Processors
    criteria: Callable[..., torch.Tensor]
    do_sample: bool
    pads_done_rows: bool
    pad_token_id: int
    keeps_scores: bool = False
    keeps_logits: bool = False
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    drops_rows = False

    def draft(
        self, rows: Sequence[Row], max_nodes: int, transcript: Transcript, budget: Budget
    ) -> list[DraftTree]:
        """One tree for each row; a row that stopped gets the pads that are sure to come."""
        padded = [self.pads_done_rows and transcript.done[row.index] for row in rows]
        trees = [
            row.draft(1 if pad else max_nodes, transcript, budget.search(max_nodes))
            for row, pad in zip(rows, padded, strict=True)
        ]
        budget.fit(trees, max_nodes)
        depth = max(max(tree.depths) for tree in trees)
        for tree, pad in zip(trees, padded, strict=True):
            for node in range(depth if pad else 0):
                tree.add(node, self.pad_token_id, 1.0)
        return trees

    def read(self, logits: torch.Tensor) -> None:
        """Asks for nothing: what is chosen at a level depends on the one above."""

    def verify(
        self,
        rows: Sequence[Row],
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        transcript: Transcript,
    ) -> list[StepRecord]:
        """Walks all trees level by level until one row has no child for its token."""
        nodes = [0] * len(trees)
        paths: list[list[int]] = [[] for _ in trees]
        committed: list[list[int]] = [[] for _ in trees]
        while True:
            tokens = self._choose(logits, nodes, transcript)
            for place, token in enumerate(tokens):
                paths[place].append(nodes[place])
                committed[place].append(token)
            below = [
                tree.children[n].get(t) for tree, n, t in zip(trees, nodes, tokens, strict=True)
            ]
            on_tree = [node for node in below if node is not None]
            if transcript.all_done or len(on_tree) < len(below):
                break
            nodes = on_tree
        return [
            StepRecord(row=row.index, tree=tree, path=path, committed_ids=ids)
            for row, tree, path, ids in zip(rows, trees, paths, committed, strict=True)
        ]

    def _choose(self, logits: torch.Tensor, nodes: list[int], transcript: Transcript) -> list[int]:
        """Stock's loop body behind its forward."""
        prefixes = transcript.prefixes()
        picked = logits[torch.arange(len(nodes)), nodes]
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
        if self.pads_done_rows:
            tokens = tokens.masked_fill(
                torch.tensor(transcript.done, device=tokens.device), self.pad_token_id
            )
        kept = tuple(self.scores) if self.keeps_scores else None
        transcript.commit_all(tokens, self.criteria, kept)
        return tokens.tolist()
