"""The stopwatch of `selfspec check` and `selfspec demo`: the same prompts in turns, in each way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from selfspec.cli.check.questions import Question
from selfspec.machine.busy import LEAST_SHARE, processor_share
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from selfspec.cli.shared.writer import Writer
    from selfspec.plugin import SelfSpec

STOCK, DRAFTED, CACHED = "stock", "selfspec", "with cache"
MIN_ROUNDS, _MOST_ROUNDS = 2, 10
_FIRST_LOOKS = 8

Asked = Sequence[tuple[Question, list[int]]]  # with the ids of each prompt


def timed(
    writer: Writer, spec: SelfSpec | None, ids: Sequence[int], num_new: int
) -> tuple[list[int], float]:
    """The new tokens of one call, and its seconds."""
    writer.reseed()
    start = perf_counter()
    new_ids = writer.new_ids(ids, spec, max_new_tokens=num_new)
    return new_ids, perf_counter() - start


@dataclass
class Way:
    """All answers in one way: their seconds and what was counted, each for (round, prompt)."""

    seconds: list[list[float]] = field(default_factory=list)
    stats: list[list[GenerationStats]] = field(default_factory=list)

    def total(self, prompt: int | None = None) -> GenerationStats:
        """What was counted of one prompt, or of all."""
        chosen = slice(None) if prompt is None else slice(prompt, prompt + 1)
        return sum((each for row in self.stats for each in row[chosen]), GenerationStats())


@dataclass
class Comparison:
    """Stock beside each way of drafting; seconds are for answers as long as the stock one."""

    dtype: str
    lengths: dict[str, int]  # of the stock answer to each kind of prompt
    ways: dict[str, Way]
    parted: set[str] = field(default_factory=set)  # kinds of which a text was not the stock one
    shares: list[float] = field(default_factory=list)  # of the processor, where we asked for it

    def speed_ups(self, way: str, axis: int) -> np.ndarray:
        """Of each prompt over all rounds (axis 0), or of all prompts in each round (axis 1)."""
        stock, drafted = (np.array(self.ways[name].seconds).sum(axis) for name in (STOCK, way))
        speed_ups: np.ndarray = stock / drafted
        return speed_ups

    def speed_up(self, way: str) -> float:
        """The median over the rounds."""
        return float(np.median(self.speed_ups(way, 1)))

    def interval(self, way: str) -> tuple[float, float]:
        """Where the speed-up lies, two standard errors around the mean of the rounds' logarithms.

        The more rounds there are, the narrower it is.
        """
        logs = np.log(self.speed_ups(way, 1))
        half = 2 * logs.std(ddof=1) / len(logs) ** 0.5
        return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))

    @property
    def best_way(self) -> str:
        """The way of drafting that was fastest."""
        return max((name for name in self.ways if name != STOCK), key=self.speed_up)

    @property
    def num_drafted(self) -> int:
        """The drafted tokens that were in any forward."""
        return sum(way.total().drafted_by_source.total() for way in self.ways.values())

    @property
    def share(self) -> float:
        """The part of the processor that this process got where it asked for all of it."""
        return median(self.shares or [1.0])

    @property
    def is_busy(self) -> bool:
        """Do other programs take so much of the processor that times say little?"""
        return self.share < LEAST_SHARE


def measure(
    writer: Writer,
    asked: Asked,
    drafting: Mapping[str, Callable[[], SelfSpec]],
    *,
    num_new: int,
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Answers all prompts plainly and in each way of drafting, in rounds, while there is time.

    Each round has new `SelfSpec`s, so every round drafts alike: the first prompt from nothing or
    from a cache, and later ones from what was learned by then.
    """
    end = perf_counter() + seconds
    limit = writer.loaded.max_positions or math.inf
    found = Comparison(writer.dtype, {}, {way: Way() for way in (STOCK, *drafting)})
    for number in range(_MOST_ROUNDS):
        began = perf_counter()
        specs = {STOCK: None, **{way: new_spec() for way, new_spec in drafting.items()}}
        for way in found.ways.values():
            way.seconds.append([])
            way.stats.append([])
        for index, (question, ids) in enumerate(asked):
            say(f"Measuring: round {number + 1}, {question.kind}")
            found.shares += _shares(writer.model)
            length = int(min(num_new, limit - len(ids)))
            texts: dict[str, list[int]] = {}
            took: dict[str, float] = {}
            turns = list(specs.items())
            # The second run may find the processor's caches warm, so the order alternates.
            for name, spec in turns if (number + index) % 2 == 0 else reversed(turns):
                texts[name], took[name] = timed(writer, spec, ids, length)
            found.lengths[question.kind] = len(texts[STOCK])
            for name, spec in turns:
                a_token = took[name] / len(texts[name])
                found.ways[name].seconds[-1].append(a_token * len(texts[STOCK]))
                found.ways[name].stats[-1].append(spec.stats if spec else GenerationStats())
                if texts[name] != texts[STOCK]:
                    found.parted.add(question.kind)
        now = perf_counter()
        if found.is_busy or (number + 1 >= MIN_ROUNDS and end - now < now - began):
            break
    return found


def share_at_first(model: Any) -> float:
    """The part of the processor that this process gets before anything is measured."""
    return median([each for _ in range(_FIRST_LOOKS) for each in _shares(model)] or [1.0])


def _shares(model: Any) -> list[float]:
    """The part of the processor that this process gets; empty for a model on a GPU."""
    return [processor_share()] if model.device.type == "cpu" else []
