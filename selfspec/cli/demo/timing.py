"""The demo's stopwatch: times stock and selfspec on the same prompts, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from selfspec.cli.shared.live_text import OWN, origins
from selfspec.cli.shared.writer import Writer
from selfspec.config import SpecConfig
from selfspec.records import StepRecord
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from selfspec.plugin import SelfSpec

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """One timed call: its new ids, how long it took, and what selfspec did in it."""

    new_ids: list[int]
    seconds: float
    stats: GenerationStats = field(default_factory=GenerationStats)
    records: Sequence[StepRecord] = ()

    def count_origins(self) -> Counter[str]:
        """How many of the new tokens came from where; they add up to all of them."""
        counts = Counter(origin for record in self.records for origin in origins(record))
        counts[OWN] += len(self.new_ids) - counts.total()
        return counts


@dataclass
class Timed:
    """All runs over one prompt, round by round."""

    stock: list[Run] = field(default_factory=list)
    drafted: list[Run] = field(default_factory=list)


def warm_up(writer: Writer, ids: Sequence[int], config: SpecConfig) -> None:
    """Runs each way once, so that the costs of a first call are not timed."""
    for spec in (None, writer.new_spec(config)):
        writer.write(ids, spec, max_new_tokens=_WARM_UP_TOKENS)


def measure(
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    config: SpecConfig,
    *,
    rounds: int,
    on_run: Callable[[str], object] = lambda _: None,
) -> list[Timed]:
    """Times stock and selfspec prompt by prompt; returns the runs of each prompt.

    Each round has a new `SelfSpec`, so every round drafts alike: the first prompt from nothing or
    from the writer's cache, and later ones from what was learned by then.
    """
    timed = [Timed() for _ in prompts]
    for number in range(rounds):
        spec = writer.new_spec(config)
        spec.ability(writer.model)  # The model is probed before the clock runs, as in a server.
        for index, ids in enumerate(prompts):
            on_run(f"round {number + 1} of {rounds}, snippet {index + 1} of {len(prompts)}")
            turns = [(timed[index].stock, None), (timed[index].drafted, spec)]
            # The second run may find the processor's caches warm, so the order alternates.
            for runs, assistant in turns if (number + index) % 2 == 0 else reversed(turns):
                runs.append(_run(writer, ids, assistant))
    return timed


def _run(writer: Writer, ids: Sequence[int], spec: SelfSpec | None) -> Run:
    """Times one call. Its records are only collected meanwhile, and nothing is drawn."""
    writer.reseed()
    records: list[StepRecord] = []
    start = perf_counter()
    with spec.listening(records.append) if spec else nullcontext():
        new_ids = writer.new_ids(ids, spec)
    stats = spec.stats if spec else GenerationStats()
    return Run(new_ids, perf_counter() - start, stats, records)
