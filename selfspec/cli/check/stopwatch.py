"""The stopwatch of `selfspec demo` and `selfspec check`: plain and drafted answers, in turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import mean, median, stdev
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from selfspec.cli.check.questions import Question
from selfspec.cli.shared.live_text import OWN, Watch, origins
from selfspec.cli.shared.writer import Writer
from selfspec.records import StepRecord
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from selfspec.plugin import SelfSpec

PLAIN, DRAFTED, CACHED = "plain", "selfspec", "with the cache"

MIN_ROUNDS, _MOST_ROUNDS = 2, 10
_LOOK = 0.05  # seconds for which the processor's share is looked at
_FREE = 0.8  # The machine is too busy if we get less of its processor than that.

# Makes the `SelfSpec` of a round, for each way of drafting by its name.
Ways = Mapping[str, Callable[[], "SelfSpec"]]
Say = Callable[[str], None]
Asked = Sequence[tuple[Question, list[int]]]  # with the ids of each prompt


@dataclass(frozen=True)
class TimedAnswer:
    """One answer: what it took to read the prompt and to write the rest, and how it was drafted."""

    new_ids: list[int]
    prompt_seconds: float  # up to the first new token
    answer_seconds: float  # for those behind it
    stats: GenerationStats = field(default_factory=GenerationStats)
    drafted_by: Counter[str] = field(default_factory=Counter)  # of the new tokens

    @property
    def num_timed(self) -> int:
        """The tokens behind the first one; 1 for an answer without any."""
        return max(len(self.new_ids) - 1, 1)

    @property
    def origins(self) -> Counter[str]:
        """How many of the new tokens came from where; they add up to all of them."""
        own = len(self.new_ids) - self.drafted_by.total() + self.drafted_by[OWN]
        return Counter({**self.drafted_by, OWN: own})

    def seconds(self, num_timed: int) -> float:
        """What the whole call would take for an answer of another length."""
        return self.prompt_seconds + self.answer_seconds * num_timed / self.num_timed


@dataclass
class ComparedPrompt:
    """One prompt, answered in each way, round by round."""

    kind: str
    answers: dict[str, list[TimedAnswer]]

    def seconds(self, way: str) -> list[float]:
        """The seconds of each round, as if all answers were as long as the plain one."""
        return [
            answer.seconds(plain.num_timed)
            for plain, answer in zip(self.answers[PLAIN], self.answers[way], strict=True)
        ]

    def speed_up(self, way: str) -> float:
        """How many times faster than plain decoding it was, over all rounds."""
        return sum(self.seconds(PLAIN)) / sum(self.seconds(way))

    @property
    def parts_at(self) -> int | None:
        """The first token at which a drafted text differs from the plain one, if one does."""
        expected = self.answers[PLAIN][0].new_ids
        for way, answers in self.answers.items():
            for got in (answer.new_ids for answer in answers if way != PLAIN):
                if got != expected:
                    pairs = enumerate(zip(got, expected, strict=False))
                    shorter = min(len(got), len(expected))
                    return next((i for i, (one, other) in pairs if one != other), shorter)
        return None


@dataclass
class Comparison:
    """All answers of a model, and what they say."""

    dtype: str
    prompts: list[ComparedPrompt]
    shares: list[float] = field(default_factory=list)  # of the processor, where we asked for it

    @property
    def ways(self) -> list[str]:
        """The ways of drafting."""
        return [way for way in self.prompts[0].answers if way != PLAIN]

    @property
    def num_rounds(self) -> int:
        """How often each prompt was answered in each way."""
        return len(self.prompts[0].answers[PLAIN])

    @property
    def num_tokens(self) -> int:
        """Of one plain answer to each prompt."""
        return sum(len(each.answers[PLAIN][0].new_ids) for each in self.prompts)

    def stats(self, way: str) -> GenerationStats:
        """Of all answers in that way."""
        answers = (answer for each in self.prompts for answer in each.answers[way])
        return sum((answer.stats for answer in answers), GenerationStats())

    @property
    def num_drafted(self) -> int:
        """The drafted tokens that were in any forward."""
        return sum(self.stats(way).drafted_by_source.total() for way in self.ways)

    def seconds(self, way: str) -> list[float]:
        """Of all prompts together, round by round."""
        return [sum(each) for each in zip(*(p.seconds(way) for p in self.prompts), strict=True)]

    def speed_ups(self, way: str) -> list[float]:
        """Of all prompts together, round by round."""
        pairs = zip(self.seconds(PLAIN), self.seconds(way), strict=True)
        return [plain / drafted for plain, drafted in pairs]

    def speed_up(self, way: str) -> float:
        """The median over the rounds."""
        return median(self.speed_ups(way))

    def interval(self, way: str) -> tuple[float, float]:
        """Where the speed-up lies, two standard errors around the mean of the rounds' logarithms.

        The more rounds there are, the narrower it is.
        """
        logs = [math.log(each) for each in self.speed_ups(way)]
        if len(logs) < MIN_ROUNDS:
            return 0.0, math.inf
        middle, half = mean(logs), 2 * stdev(logs) / math.sqrt(len(logs))
        return math.exp(middle - half), math.exp(middle + half)

    @property
    def best_way(self) -> str:
        """The way of drafting that was fastest."""
        return max(self.ways, key=self.speed_up)

    @property
    def variation(self) -> float:
        """By how much the slowest plain run of a prompt usually exceeds the fastest one."""
        runs = [each.seconds(PLAIN) for each in self.prompts]
        return median(max(seconds) / min(seconds) - 1 for seconds in runs)

    @property
    def share(self) -> float:
        """The part of the processor that this process got where it asked for all of it."""
        return median(self.shares) if self.shares else 1.0

    @property
    def is_busy(self) -> bool:
        """Do other programs take so much of the processor that times say little?"""
        return self.share < _FREE


def warm_up(writer: Writer, spec: SelfSpec, ids: Sequence[int]) -> float:
    """Runs each way for some tokens, so that a first call's costs are not timed.

    Returns what a plain step takes about, in seconds.
    """
    for assistant in (spec, None):
        answer = _answer(writer, assistant, ids, 8)
    return answer.answer_seconds / answer.num_timed


def measure(
    writer: Writer,
    asked: Asked,
    ways: Ways,
    *,
    num_new: int,
    seconds: float,
    say: Say = lambda _: None,
) -> Comparison:
    """Answers all prompts plainly and in each way, in as many rounds as there is time for.

    Each round has new `SelfSpec`s, so every round drafts alike: the first prompt from nothing or
    from a cache, and later ones from what was learned by then.
    """
    end = perf_counter() + seconds
    limit = writer.loaded.max_positions or math.inf
    prompts = [ComparedPrompt(each.kind, {way: [] for way in (PLAIN, *ways)}) for each, _ in asked]
    found = Comparison(writer.dtype, prompts)
    for number in range(_MOST_ROUNDS):
        began = perf_counter()
        specs = {PLAIN: None, **{way: new_spec() for way, new_spec in ways.items()}}
        for index, (question, ids) in enumerate(asked):
            say(f"Measuring: round {number + 1}, {question.kind}")
            found.shares += _processor_share(writer.model)
            turns = list(specs.items())
            # The second run may find the processor's caches warm, so the order alternates.
            for way, spec in turns if (number + index) % 2 == 0 else reversed(turns):
                expected = writer.encode_prediction(question.prediction) if spec else None
                length = int(min(num_new, limit - len(ids)))
                answer = _answer(writer, spec, ids, length, expected)
                prompts[index].answers[way].append(answer)
        now = perf_counter()
        if found.is_busy or (number + 1 >= MIN_ROUNDS and end - now < now - began):
            break
    return found


def _answer(
    writer: Writer,
    spec: SelfSpec | None,
    ids: Sequence[int],
    num_new: int,
    prediction: list[int] | None = None,
) -> TimedAnswer:
    """Times one call. Its records are only collected meanwhile, and nothing is drawn."""
    watch, records = Watch(), list[StepRecord]()
    writer.reseed()
    start = perf_counter()
    with spec.listening(records.append) if spec else nullcontext():
        new_ids = writer.new_ids(
            ids, spec, streamer=watch, max_new_tokens=num_new, prediction=prediction
        )
    ended = perf_counter()
    first = watch.first_came or ended
    return TimedAnswer(
        new_ids,
        first - start,
        ended - first,
        spec.stats if spec else GenerationStats(),
        Counter(origin for record in records for origin in origins(record)),
    )


def _processor_share(model: Any) -> list[float]:
    """The part of a processor that this process gets when it asks for all of torch's threads.

    Empty for a model on a GPU. Half means that others are as busy as we are.
    """
    import torch

    if model.device.type != "cpu":
        return []
    matrix = torch.ones(512, 512, device="cpu")
    start, used = perf_counter(), process_time()
    while perf_counter() - start < _LOOK:
        torch.mm(matrix, matrix)
    took = perf_counter() - start
    return [(process_time() - used) / took / torch.get_num_threads()]
