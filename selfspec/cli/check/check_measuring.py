"""What `selfspec check` measures of one model in one precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    def seconds_a_token(self) -> float:
        """Of the answer behind its first token."""
        return self.answer_seconds / max(len(self.new_ids) - 1, 1)

    def speed_up(self, drafted: Answered) -> float:
        """How many times faster the other one is; its answer counts as if it were as long."""
        rest = drafted.seconds_a_token * max(len(self.new_ids) - 1, 1)
        return self.seconds / (drafted.prompt_seconds + rest)


@dataclass
class Measured:
    """All that was found out about a model in one precision."""

    dtype: str
    about: dict[str, Any]  # what the curve depends on
    curve: CostCurve | None  # None: this model can't verify trees
    threads: dict[int, float]  # seconds of a plain step by the number of threads
    kinds: list[str] = field(default_factory=list)
    plain: list[Answered] = field(default_factory=list)  # of two runs the faster one
    drafted: list[Answered] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)  # in bits a token, of each plain answer
    variations: list[float] = field(default_factory=list)  # of two plain runs, 0 for equal ones
    stats: GenerationStats = field(default_factory=GenerationStats)

    @property
    def variation(self) -> float:
        """How far two plain runs of one prompt usually lie apart."""
        return median(self.variations)

    @property
    def speed_ups(self) -> list[float]:
        """Of each prompt."""
        pairs = zip(self.plain, self.drafted, strict=True)
        return [plain.speed_up(drafted) for plain, drafted in pairs]

    @property
    def speed_up(self) -> float:
        """Of all prompts together."""
        pairs = list(zip(self.plain, self.drafted, strict=True))
        drafted = sum(plain.seconds / plain.speed_up(other) for plain, other in pairs)
        return sum(plain.seconds for plain, _ in pairs) / drafted

    @property
    def entropy(self) -> float:
        """The mean over all tokens, in bits."""
        weights = [len(each.new_ids) for each in self.plain]
        return sum(map(float.__mul__, self.entropies, map(float, weights))) / max(sum(weights), 1)

    @property
    def seconds_a_token(self) -> float:
        """Of all prompts and answers, in the faster of the two ways."""
        tokens = sum(len(each.new_ids) for each in self.plain)
        return sum(each.seconds for each in self.plain) / tokens / max(self.speed_up, 1.0)


def measure_model(
    writer: Writer,
    questions: Sequence[Question],
    config: SpecConfig,
    *,
    seconds: float,
    context: int,
    say: Say,
) -> Measured:
    """Takes about that many seconds, and longer where single steps take long."""
    end = perf_counter() + seconds
    say(f"{writer.dtype}: what a step costs by its width")
    spec = writer.new_spec(config)
    about: dict[str, Any] = {}
    curve = None
    if spec.ability(writer.model).attention is not None:
        from selfspec.run.profile import profile

        at_most = _CURVE_SHARE * seconds
        about, curve = profile(
            writer.model, config, num_columns=context, num_rows=1, max_seconds=at_most
        )
        about = {**about, "context": context}
    threads = _threads(writer.model)
    found = Measured(writer.dtype, about, curve, threads)
    asked = _fitting(writer, questions)
    say(f"{writer.dtype}: warming up")
    warm_up(writer, asked[0][1], config)
    step = min(threads.values())
    for index, (question, prompt) in enumerate(asked):
        left = max(end - perf_counter(), 0.0) / (len(asked) - index)
        room = (writer.loaded.max_positions or _ENDLESS) - len(prompt)
        num_new = min(max(int(left / (3 * step)), _LEAST_TOKENS), _MOST_TOKENS, room)
        say(f"{writer.dtype}: {question.kind}, {num_new} tokens, plain and with drafts")
        _ask(found, writer, spec, question, prompt, num_new)
        found.entropies.append(_entropy(writer.model, prompt, found.plain[-1].new_ids))
    found.stats = spec.total_stats
    return found


def _fitting(writer: Writer, questions: Sequence[Question]) -> list[tuple[Question, list[int]]]:
    """The questions with their ids. Those that leave no room for an answer are left out."""
    limit = writer.loaded.max_positions or _ENDLESS
    ids = encoded_prompts([each.prompt for each in questions], writer.tokenizer)
    found = [
        (question, prompt)
        for question, prompt in zip(questions, ids, strict=True)
        if len(prompt) + _LEAST_TOKENS <= limit
    ]
    if not found:
        raise CliError(
            f"a prompt must leave room for {_LEAST_TOKENS} tokens in the model's {limit} positions "
            f"(got {min(map(len, ids))} tokens in the shortest one); give shorter ones"
        )
    return found


def _ask(
    found: Measured,
    writer: Writer,
    spec: SelfSpec,
    question: Question,
    prompt: Sequence[int],
    num_new: int,
) -> None:
    """Plainly, with drafts, and plainly once more: a busy moment shows where the two differ."""
    first, drafted, last = (
        _answer(writer, assistant, question, prompt, num_new) for assistant in (None, spec, None)
    )
    plain, slower = sorted((first, last), key=lambda each: each.seconds)
    found.kinds.append(question.kind)
    found.plain.append(plain)
    found.drafted.append(drafted)
    found.variations.append(slower.seconds / plain.seconds - 1)


def _answer(
    writer: Writer,
    spec: SelfSpec | None,
    question: Question,
    prompt: Sequence[int],
    num_new: int,
) -> Answered:
    watch = _Watch()
    prediction = None if spec is None else writer.encode_prediction(question.prediction)
    writer.reseed()
    start = perf_counter()
    output = writer.write(
        prompt, spec, streamer=watch, max_new_tokens=num_new, prediction=prediction
    )
    new_ids = output.sequences[0, len(prompt) :].tolist()  # This waits for the device.
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
    import torch

    ids = torch.tensor([[*prompt, *new_ids]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(new_ids) + 1).logits
    logs = logits[0, :-1].float().log_softmax(-1)
    nats = -(logs.exp() * logs.nan_to_num(neginf=0.0)).sum(-1).mean()
    return float(nats) / torch.tensor(2.0).log().item()
