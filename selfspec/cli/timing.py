"""The demo's stopwatch: stock and selfspec on the same prompts, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from selfspec.cli.live import OWN, origins
from selfspec.cli.writer import Writer
from selfspec.config import SpecConfig
from selfspec.records import StepRecord
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from selfspec.plugin import SelfSpec

__all__ = ["Run", "Timed", "measure", "warm_up"]

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
    """All runs over one prompt."""

    stock: list[Run] = field(default_factory=list)
    drafted: list[Run] = field(default_factory=list)

    @property
    def stock_seconds(self) -> float:
        """Median over the rounds."""
        return median(run.seconds for run in self.stock)

    @property
    def drafted_seconds(self) -> float:
        """Median over the rounds."""
        return median(run.seconds for run in self.drafted)


def warm_up(writer: Writer, ids: Sequence[int], config: SpecConfig) -> None:
    """Pays for what only first calls cost, with a `SelfSpec` that is thrown away."""
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
    """Times stock and selfspec prompt by prompt; each round has a new `SelfSpec`.

    So the first prompt of a round is met cold, or with the writer's cache, and later ones with
    what was learned by then.
    """
    timed = [Timed() for _ in prompts]
    for number in range(rounds):
        spec = writer.new_spec(config)
        spec.ability(writer.model)  # what the model can do is tried once, when a server starts
        for place, ids in enumerate(prompts):
            on_run(f"round {number + 1} of {rounds}, snippet {place + 1} of {len(prompts)}")
            turns = [(timed[place].stock, None), (timed[place].drafted, spec)]
            # whoever goes second may find things warmer, so they change places
            for runs, assistant in turns if (number + place) % 2 == 0 else reversed(turns):
                runs.append(_run(writer, ids, assistant))
    return timed


def _run(writer: Writer, ids: Sequence[int], spec: SelfSpec | None) -> Run:
    """One call; records are put by and looked at afterwards, and nothing is drawn meanwhile."""
    writer.reseed()
    start = perf_counter()
    if spec is None:
        output = writer.write(ids, None)
        new_ids = output.sequences[0, len(ids) :].tolist()  # waits for the device
        return Run(new_ids, perf_counter() - start)
    records: list[StepRecord] = []
    with spec.listening(records.append):
        output = writer.write(ids, spec)
    new_ids = output.sequences[0, len(ids) :].tolist()
    return Run(new_ids, perf_counter() - start, spec.stats, records)
