"""What `selfspec check` measures of one model in one precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from selfspec.cli.check.check_prompts import Question
from selfspec.cli.demo.timing import warm_up
from selfspec.cli.shared.text_files import encoded_prompts
from selfspec.cli.shared.writer import Writer
from selfspec.config import SpecConfig
from selfspec.errors import CliError
from selfspec.stats import GenerationStats

if TYPE_CHECKING:
    from selfspec.cost import CostCurve
    from selfspec.plugin import SelfSpec

Say = Callable[[str], None]

_CURVE_SHARE = 0.2  # of the time, for what a step costs by its width
_LEAST_TOKENS, _MOST_TOKENS = 16, 96  # of an answer
_CONTEXT = 512  # tokens before a step whose cost is measured
_ENDLESS = 1 << 30  # positions, where a model's config names no limit
_REPEATS = 5  # turns of each number of threads
_MUCH = 1.1  # Another number of threads has to be faster than that to be named.


@dataclass(frozen=True)
class Answered:
    """One answer: what it took to read the prompt, and to write the rest."""

    num_prompt: int
    new_ids: list[int]
    prompt_seconds: float  # up to the first new token
    answer_seconds: float  # for those behind it

    @property
    def seconds(self) -> float:
        """Of the whole call."""
        return self.prompt_seconds + self.answer_seconds

    @property
    def num_timed(self) -> int:
        """The tokens behind the first one; 1 for an answer without any."""
        return max(len(self.new_ids) - 1, 1)


@dataclass(frozen=True)
class Compared:
    """One prompt, answered plainly and with drafts."""

    kind: str
    plain: Answered  # of two runs the faster one
    drafted: Answered
    variation: float  # how much longer the slower plain run took, as a share
    entropy: float  # of the plain answer, in bits a token

    @property
    def drafted_seconds(self) -> float:
        """With drafts, if that answer were as long as the plain one."""
        share = self.plain.num_timed / self.drafted.num_timed
        return self.drafted.prompt_seconds + share * self.drafted.answer_seconds

    @property
    def speed_up(self) -> float:
        """How many times faster it was with drafts."""
        return self.plain.seconds / self.drafted_seconds


@dataclass(frozen=True)
class Measured:
    """All that was found out about a model in one precision."""

    dtype: str
    about: dict[str, Any]  # what the curve depends on
    curve: CostCurve | None  # None: this model can't verify trees
    threads: dict[int, float]  # seconds of a plain step by the number of threads
    prompts: list[Compared]
    stats: GenerationStats

    @property
    def variation(self) -> float:
        """How far two plain runs of one prompt usually lie apart."""
        return median(each.variation for each in self.prompts)

    @property
    def plain_seconds(self) -> float:
        """Of all prompts and plain answers."""
        return sum(each.plain.seconds for each in self.prompts)

    @property
    def speed_up(self) -> float:
        """Of all prompts together."""
        return self.plain_seconds / sum(each.drafted_seconds for each in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Of all plain answers."""
        return sum(len(each.plain.new_ids) for each in self.prompts)

    @property
    def entropy(self) -> float:
        """The mean over all tokens, in bits."""
        bits = sum(each.entropy * len(each.plain.new_ids) for each in self.prompts)
        return bits / max(self.num_tokens, 1)

    @property
    def seconds_a_token(self) -> float:
        """Of all prompts and answers, in the faster of the two ways."""
        return self.plain_seconds / self.num_tokens / max(self.speed_up, 1.0)


def measure_model(
    writer: Writer, questions: Sequence[Question], *, seconds: float, say: Say
) -> Measured:
    """Takes about that many seconds, and longer where single steps take long."""
    end = perf_counter() + seconds
    spec = writer.new_spec(SpecConfig())
    say(f"{writer.dtype}: what a step costs by its width")
    about, curve = _curve(writer, spec, _CURVE_SHARE * seconds)
    threads = _threads(writer.model)
    asked = _fitting(writer, questions)
    say(f"{writer.dtype}: warming up")
    warm_up(writer, asked[0][1], spec.config)
    step = min(threads.values())
    prompts = []
    for index, (question, ids) in enumerate(asked):
        left = max(end - perf_counter(), 0.0) / (len(asked) - index)
        room = (writer.loaded.max_positions or _ENDLESS) - len(ids)
        num_new = min(max(int(left / (3 * step)), _LEAST_TOKENS), _MOST_TOKENS, room)
        say(f"{writer.dtype}: {question.kind}, {num_new} tokens, plain and with drafts")
        prompts.append(_compared(writer, spec, question, ids, num_new))
    return Measured(writer.dtype, about, curve, threads, prompts, spec.total_stats)


def _curve(
    writer: Writer, spec: SelfSpec, max_seconds: float
) -> tuple[dict[str, Any], CostCurve | None]:
    """What a step costs by its width behind a text, and what that depends on."""
    if spec.ability(writer.model).attention is None:
        return {}, None
    from selfspec.run.profile import profile

    context = min(_CONTEXT, (writer.loaded.max_positions or _ENDLESS) // 2)
    about, curve = profile(
        writer.model, spec.config, num_columns=context, num_rows=1, max_seconds=max_seconds
    )
    return {**about, "context": context}, curve


def _fitting(writer: Writer, questions: Sequence[Question]) -> list[tuple[Question, list[int]]]:
    """The questions with their ids. Those that leave no room for an answer are left out."""
    limit = writer.loaded.max_positions or _ENDLESS
    ids = encoded_prompts([each.prompt for each in questions], writer.tokenizer)
    pairs = zip(questions, ids, strict=True)
    found = [(each, prompt) for each, prompt in pairs if len(prompt) + _LEAST_TOKENS <= limit]
    if not found:
        raise CliError(
            f"a prompt must leave room for {_LEAST_TOKENS} tokens in the model's {limit} positions "
            f"(got {min(map(len, ids))} tokens in the shortest one); give shorter ones"
        )
    return found


def _compared(
    writer: Writer, spec: SelfSpec, question: Question, ids: Sequence[int], num_new: int
) -> Compared:
    """Plainly, with drafts, and plainly once more: a busy moment shows where the two differ."""
    prediction = writer.encode_prediction(question.prediction)
    first = _answer(writer, None, ids, num_new, None)
    drafted = _answer(writer, spec, ids, num_new, prediction)
    last = _answer(writer, None, ids, num_new, None)
    plain, slower = sorted((first, last), key=lambda each: each.seconds)
    entropy = _entropy(writer.model, ids, plain.new_ids)
    return Compared(question.kind, plain, drafted, slower.seconds / plain.seconds - 1, entropy)


def _answer(
    writer: Writer,
    spec: SelfSpec | None,
    prompt: Sequence[int],
    num_new: int,
    prediction: list[int] | None,
) -> Answered:
    watch = _Watch()
    writer.reseed()
    start = perf_counter()
    new_ids = writer.new_ids(
        prompt, spec, streamer=watch, max_new_tokens=num_new, prediction=prediction
    )
    ended = perf_counter()
    first = watch.first or ended
    return Answered(len(prompt), new_ids, first - start, ended - first)


class _Watch:
    """A streamer that looks at the clock when the first token comes, behind the prompt."""

    def __init__(self) -> None:
        self.first: float | None = None
        self._num_put = 0

    def put(self, _value: Any) -> None:
        self._num_put += 1
        if self._num_put == 2:
            self.first = perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def _threads(model: Any) -> dict[int, float]:
    """Seconds of a forward of one token by the number of threads: all that torch uses, and half."""
    import torch

    usual = torch.get_num_threads()
    if model.device.type != "cpu":
        return {usual: _plain_seconds(model)}
    found: dict[int, float] = {}
    try:
        for _ in range(_REPEATS):  # In turns, since a busy moment must not decide.
            for number in {usual, max(usual // 2, 1)}:
                torch.set_num_threads(number)
                found[number] = min(found.get(number, 1e9), _plain_seconds(model))
    finally:
        torch.set_num_threads(usual)
    best = min(found, key=lambda number: found[number])
    return found if found[best] * _MUCH < found[usual] else {usual: found[usual]}


def _plain_seconds(model: Any) -> float:
    """The faster of two forwards of one token behind nothing."""
    import torch

    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    times = []
    with torch.no_grad():
        for _ in range(2):
            start = perf_counter()
            model(input_ids=token, use_cache=False).logits.sum().item()
            times.append(perf_counter() - start)
    return min(times)


def _entropy(model: Any, prompt: Sequence[int], new_ids: Sequence[int]) -> float:
    """How undecided the model was about the tokens of an answer, in bits a token."""
    import math

    import torch

    ids = torch.tensor([[*prompt, *new_ids]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(new_ids) + 1).logits
    logs = logits[0, :-1].float().log_softmax(-1)
    nats = -(logs.exp() * logs.nan_to_num(neginf=0.0)).sum(-1).mean()
    return float(nats) / math.log(2)
