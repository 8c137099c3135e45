"""Answers the same prompts plainly and with drafts, in turns, and compares times and texts.

The prompts come with selfspec, or they are the user's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from selfspec.cli.prompt_files import PromptLine, read_prompts
from selfspec.serving.images import has_images
from selfspec.serving.settings import Settings
from selfspec.serving.translator import Encoded, num_tokens
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from selfspec.cli.writer import Writer
    from selfspec.plugin import SelfSpec

MIN_ROUNDS, _MOST_ROUNDS = 2, 10
_PROMPTS = Path(__file__).parent / "prompts"


class Question(NamedTuple):
    name: str
    prompt: Any  # A text, or messages.
    is_turn: bool = False  # Is the text what a user would say to a model that can chat?

    @property
    def has_images(self) -> bool:
        return has_images(self.prompt)

    def encoded(self, writer: Writer) -> Encoded:
        prompt = self.prompt
        if self.is_turn and writer.tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        return writer.translator().encoded(prompt, Settings())


def snippets() -> list[Question]:
    """What the embedded model continues.

    Each ends in the middle of something that is frequent in Python's library, and what the model
    adds makes sense for about fifty tokens.
    """
    return [Question(str(line.name), line.prompt) for line in _lines_of("snippets")]


def questions_of(path: Path | None) -> list[Question]:
    """The file's questions, named by their lines. Without a file, one for every sort of work."""
    if path is None:
        lines = _lines_of("questions")
        return [Question(str(line.name), line.prompt, is_turn=True) for line in lines]
    lines = read_prompts(path, "--prompts")
    return [Question(f"prompt {line.number}", line.prompt) for line in lines]


def _lines_of(name: str) -> list[PromptLine]:
    return read_prompts(_PROMPTS / f"{name}.jsonl", name)


Prompts = Sequence[tuple[Question, Encoded]]  # Each question with its tokens and images.
Answer = tuple[list[int], float]  # The new tokens, and the seconds that they took.


@dataclass
class Comparison:
    """Plain `generate()` and drafts. Seconds are for answers as long as the plain one."""

    dtype: str
    lengths: dict[str, int] = field(default_factory=dict)  # Tokens of the plain answers.
    plain: list[list[float]] = field(default_factory=list)  # Per round: seconds of each prompt.
    drafted: list[list[float]] = field(default_factory=list)
    stats: dict[str, GenerationStats] = field(default_factory=dict)  # Per prompt.
    parted: set[str] = field(default_factory=set)  # Prompts whose two texts differ.
    packs: bool = False  # Were weights packed for drafts, and not for plain texts?

    def add(self, names: Sequence[str], plain: Sequence[Answer], drafted: Sequence[Answer]) -> None:
        """Takes in a round: the new tokens and the seconds of each prompt."""
        self.plain.append([seconds for _, seconds in plain])
        self.drafted.append([])
        for name, (text, _), (new_ids, seconds) in zip(names, plain, drafted, strict=True):
            self.drafted[-1].append(seconds / len(new_ids) * len(text))
            self.lengths[name] = len(text)
            if new_ids != text:
                self.parted.add(name)

    @property
    def total(self) -> GenerationStats:
        return sum(self.stats.values(), GenerationStats())

    @property
    def seconds(self) -> np.ndarray:
        """(2, P + 1): of `generate()` and of drafts, each prompt's median round, then the sum."""
        medians = np.median([self.plain, self.drafted], axis=1)
        return np.hstack([medians, medians.sum(axis=1, keepdims=True)])

    @property
    def speed_up(self) -> float:
        plain, drafted = self.seconds[:, -1]
        return float(plain / drafted)

    @property
    def interval(self) -> tuple[float, float]:
        """The mean of the rounds' logarithms, minus and plus two standard errors."""
        logs = np.log(np.sum(self.plain, axis=1) / np.sum(self.drafted, axis=1))
        half = 2 * logs.std(ddof=1) / len(logs) ** 0.5
        return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))

    @property
    def num_drafted(self) -> int:
        return self.total.drafted_by_source.total()


def packed(writer: Writer, *, is_wanted: bool) -> bool:
    """Packs the weights of the model, or gives them back; are any packed now?"""
    from selfspec.weights.packing import is_packed_in_place, pack, unpack

    if is_wanted:
        pack(writer.model)
    else:
        unpack(writer.model)
    return any(map(is_packed_in_place, writer.model.modules()))


def timed(writer: Writer, spec: SelfSpec | None, ids: Encoded, num_new: int) -> Answer:
    writer.reseed()
    start = perf_counter()
    new_ids = writer.new_ids(ids, spec, max_new_tokens=num_new)
    return new_ids, perf_counter() - start


def measure(
    writer: Writer,
    prompts: Prompts,
    new_spec: Callable[[], SelfSpec],
    *,
    num_new: int,
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Answers all prompts in rounds, while there is time: plainly, and with drafts.

    Weights are packed for drafts, and ordinary ones for plain texts. Each round has a new
    `SelfSpec`, so all rounds draft alike.
    """
    end = perf_counter() + seconds
    measured = Comparison(writer.dtype)
    for number in range(_MOST_ROUNDS):
        began, spec = perf_counter(), new_spec()
        # The second run may find the processor's caches warm, so the order alternates.
        turns = (None, spec) if number % 2 == 0 else (spec, None)
        answers: dict[SelfSpec | None, list[Answer]] = {None: [], spec: []}
        are_packed: dict[SelfSpec | None, bool] = {}
        for turn in turns:
            are_packed[turn] = packed(writer, is_wanted=turn is not None)
            for question, ids in prompts:
                say(f"Measuring: round {number + 1}, {question.name}")
                length = min(num_new, (writer.max_positions or math.inf) - num_tokens(ids))
                answers[turn].append(timed(writer, turn, ids, int(length)))
                if turn is spec:
                    before = measured.stats.get(question.name, GenerationStats())
                    measured.stats[question.name] = before + spec.stats
        measured.add([question.name for question, _ in prompts], answers[None], answers[spec])
        measured.packs = are_packed[spec] and not are_packed[None]
        now = perf_counter()
        if number + 1 >= MIN_ROUNDS and end - now < now - began:
            break
    return measured
