"""Recorded texts replayed through the sources with no model: acceptance in seconds, on a laptop.

The text stands for the model: at each token it says what comes next, and nothing of what else was
likely. So tables learn from the text's own tokens alone, where a model would teach them its top-K
after every drafted node, and the near misses have nothing to say. Tokens per step come out lower
than with the model; what a knob or a source does to them is what it is for. The same rows and
knobs give the same figures on every machine. A `Clock` says what each step would have taken.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from eval.errors import EvalError
from eval.report.rows import Record
from eval.report.statistics import OVERALL
from eval.report.table import Table
from selfspec import GenerationStats, SelfSpec, SpecConfig, StepRecord
from selfspec.cache import load_cache
from selfspec.cost import Budget, StepTime
from selfspec.draft.drafter import Drafter
from selfspec.draft.memory import DraftMemory
from selfspec.draft.sources import RowStart
from selfspec.records import DraftTree, TopK
from selfspec.row import Row
from selfspec.verify.walk import walk

# Seconds of a step beside its forward: of each step, to look for drafts, and for each node.
_STEP, _LOOKING, _NODE = 0.3e-3, 0.2e-3, 0.04e-3
# On a busy machine, this share of the forwards is slow alone, and after this share many are.
_ODD, _BURSTS = 0.1, 0.01


class Text(NamedTuple):
    """What was asked, as ids, and what the model said."""

    task: str
    prompt_ids: list[int]
    output_ids: list[int]


class Clock:
    """Moves as steps take their time: a forward takes that of its width, with noise.

    `is_busy`: as on a machine with other work. A tenth of the forwards take two to four times as
    long, and so do ten to thirty in a row now and then. `quiet` is the time without all noise,
    which knows no width, so that luck says nothing when methods are compared by it.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        noise: float = 0.0,
        seed: int = 0,
        is_busy: bool = False,
    ) -> None:
        self.now = self.quiet = 0.0
        self._widths, self._seconds = list(seconds), list(seconds.values())
        self._noise, self._dice, self._is_busy = noise, random.Random(seed), is_busy
        self._burst = (0, 1.0)  # For how many forwards it goes on, and how slow they are.

    @property
    def plain(self) -> float:
        """The seconds of a plain step, without noise."""
        return self._seconds[0] + _STEP

    def look(self) -> None:
        self._move(_LOOKING)

    def run(self, width: int) -> None:
        """Moves by a forward of that width, and by the work around it."""
        forward = float(np.interp(width, self._widths, self._seconds))
        self._move(_STEP + _NODE * (width - 1))
        self._move(forward, self._slowness())

    def _move(self, seconds: float, slowness: float = 1.0) -> None:
        self.now += slowness * seconds
        self.quiet += seconds

    def _slowness(self) -> float:
        """How many times longer the next forward takes, whatever its width."""
        dice, slowness = self._dice, self._dice.lognormvariate(0, self._noise)
        if not self._is_busy:
            return slowness
        left, slow = self._burst
        if not left and dice.random() < _BURSTS:
            left, slow = dice.randint(10, 30), dice.uniform(2, 4)
        self._burst = max(left - 1, 0), slow
        alone = dice.uniform(2, 4) if dice.random() < _ODD else 1.0
        return slowness * (slow if left else alone)


def recorded_texts(record: Record) -> list[Text]:
    """The reference's texts of a run, in the order in which they were answered."""
    tasks = {(key.question, key.turn): line["task"] for key, line in record.answers.items()}
    texts = [
        Text(tasks[key], line["prompt_ids"], line["output_ids"])
        for key, line in record.texts.items()
    ]
    if not texts:
        raise EvalError("a run must have texts to be replayed (got none): no method answered")
    return texts


def vocab_size(texts: Sequence[Text]) -> int:
    """Of the smallest vocabulary that has all ids of the texts."""
    return 1 + max(max([*text.prompt_ids, *text.output_ids]) for text in texts)


def simulated(
    config: SpecConfig, texts: Sequence[Text], cache: str | None = None
) -> dict[str, GenerationStats]:
    """Statistics by task, and `overall`, of one `SelfSpec` kept over all texts."""
    contents = None if cache is None else load_cache(cache)
    spec = SelfSpec(config, contents=contents)
    num_ids = max(vocab_size(texts), 0 if contents is None else contents.count_ids())
    by_task: dict[str, GenerationStats] = {}
    for text in texts:
        stats = replay(text, spec.learned(num_ids).for_request(config.learning), config)
        by_task[text.task] = by_task.get(text.task, GenerationStats()) + stats
    return {**by_task, OVERALL: sum(by_task.values(), GenerationStats())}


def replays_table(found: Mapping[int, Mapping[str, GenerationStats]]) -> Table:
    """A row for each width, a column for each task."""
    tasks = list(next(iter(found.values())))
    rows = [
        [str(width), *(f"{s.tokens_per_step:.2f} ({s.nodes_per_step:.0f})" for s in tasks.values())]
        for width, tasks in found.items()
    ]
    return Table("Tokens per step (nodes), replayed", ["nodes", *tasks], rows)


def replay(
    text: Text,
    memory: DraftMemory,
    config: SpecConfig,
    budget: Budget | None = None,
    clock: Clock | None = None,
) -> GenerationStats:
    """One text, drafted for and verified step by step; its first token is the prompt's own.

    Trees are as wide as the budget says by the clock; None: all that they may, in no time.
    """
    budget, clock = budget or Budget(), clock or Clock({1: 0.0})
    stats = GenerationStats(num_calls=1, num_new_tokens=1, num_prompt_tokens_out=1)
    length = len(text.prompt_ids) + len(text.output_ids)
    prompt = torch.tensor([text.prompt_ids])
    opened = RowStart(prompt_ids=text.prompt_ids, max_new_tokens=len(text.output_ids))
    drafter = Drafter(memory, opened, config)
    row = Row(prompt=prompt, prompt_ids=text.prompt_ids, max_length=length, drafter=drafter)
    so_far = [-1, *text.prompt_ids]
    _teach(memory, so_far)
    _learn(memory, row, so_far, _verified(DraftTree.of_root(row.last_token), text.output_ids[:1]))
    while left := text.output_ids[row.num_new :]:
        step, start = budget.step(config.max_nodes), clock.now
        if step.max_nodes > 1:
            clock.look()
        limits = (step.max_nodes, row.max_depth, step.search())
        tree = drafter.draft(row.last_token, *limits)
        step.fit([tree])
        drafted = clock.now
        clock.run(len(tree))
        record = _verified(tree, left)
        stats.count_step(record)
        _learn(memory, row, so_far, record)
        step.observe(StepTime(len(tree), drafted - start, clock.now - drafted), [record])
    return stats


def _verified(tree: DraftTree, to_come: Sequence[int]) -> StepRecord:
    """The walk down the tree, where the text says which way."""
    committed: list[int] = []

    def commit(_nodes: Sequence[int]) -> tuple[list[int], bool]:
        committed.append(to_come[len(committed)])
        return committed[-1:], len(committed) == len(to_come)

    (path,) = walk([tree], commit)
    return StepRecord(row=0, tree=tree, path=path, committed_ids=committed)


def _learn(memory: DraftMemory, row: Row, so_far: list[int], record: StepRecord) -> None:
    """What the engine lets learn, and the text so far grows by the committed tokens."""
    _teach(memory, [*so_far[-2:], *record.committed_ids])
    row.new_ids += record.committed_ids
    row.drafter.observe(record)
    if memory.learns:
        memory.calibration.observe(record)
    so_far += record.committed_ids


def _teach(memory: DraftMemory, ids: Sequence[int]) -> None:
    """Shows the tables what came after each two tokens, as if the model had been sure of it."""
    triples = list(zip(ids, ids[1:], ids[2:], strict=False))
    if not memory.learns or not triples:
        return
    next_ids = np.full((len(triples), memory.top_k), -1, np.int32)
    probabilities = np.zeros((len(triples), memory.top_k), np.float16)
    next_ids[:, 0], probabilities[:, 0] = [triple[2] for triple in triples], 1.0
    pairs = np.array([triple[:2] for triple in triples], np.int64)
    memory.observe_pairs(pairs, TopK(next_ids, probabilities))
