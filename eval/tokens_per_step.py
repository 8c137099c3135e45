"""Tokens per step of drafting setups on the measuring set: acceptance, and seconds beside it.

    python -m eval tokens_per_step --model PATH --questions question.jsonl --max-nodes 4 8 16 \\
        --temperature 0 0.7 --without lut2 --cache cold my-cache my-memory

Each start, temperature and width is measured with all sources, and without each that `--without`
names. One `SelfSpec` is kept over all questions. At the first one it knows what the cache holds, or
nothing (`cold`). With `--remember`, it knows what earlier runs with that file learned.

    python -m eval tokens_per_step --model PATH --questions question.jsonl --rounds 2

asks the same questions again: a retry, an evaluation or a batch file that is run again. At a
temperature each round has other seeds, as answers that are regenerated. `--samples` asks for some
texts of each prompt in one batch. With `--edit` the chat goes on in the next round: the user asks
for the answer again, with one of its words replaced. `--stock` shows what stock takes.

A line has a task's tokens per step, with the mean number of nodes in brackets, then the seconds,
with the milliseconds of a step that are not the forward's. Trees take all nodes that they may,
unless --knob names another budget: widths are compared. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product, starmap
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.benches.dialogue import Prompter
from eval.benches.prompts import Prompts, load_questions
from eval.benches.questions import Question
from eval.errors import EvalError
from eval.methods.method import Method, SelfSpecMethod
from eval.methods.names import STOCK
from eval.models.loading import load_asked, load_model, load_tokenizer
from eval.options import (
    EVERY,
    add_knob,
    add_length,
    add_model,
    add_questions,
    check_at_least,
    parsed_knobs,
)
from eval.report.statistics import OVERALL
from eval.runs.environment import short_name, tell
from selfspec import GenerationStats, SelfSpec
from selfspec.config import SOURCE_NAMES

_COLD = "cold"
_NOT_HOST = {"forward", "prefill", "prepare"}
_EDIT = "Write this again, with {new!r} in place of {old!r}, and change nothing else."
_SEEDS = 1000  # The next round's seeds are larger by this.


class Setup(NamedTuple):
    """What is measured at once, by one `SelfSpec`."""

    cache: str
    without: str | None  # A source that is left out.
    temperature: float
    max_nodes: int

    def __str__(self) -> str:
        without = f", without {self.without}" if self.without else ""
        start = f"{short_name(self.cache)}{without}, temperature {self.temperature:g}"
        return f"{start}, {self.max_nodes:>2} nodes"

    def new_spec(self, sources: list[str], **knobs: Any) -> SelfSpec:
        """What drafts; it knows what the cache holds."""
        named = tuple(name for name in sources if name != self.without)
        knobs = {"budget": "fixed", "sources": named, "max_nodes": self.max_nodes, **knobs}
        if self.cache == _COLD:
            return SelfSpec(**knobs)
        return SelfSpec.from_pretrained(self.cache, **knobs)


class Round(NamedTuple):
    """What all questions took once, by task and `overall`; stock has no statistics."""

    seconds: float
    by_task: dict[str, GenerationStats]

    @property
    def host_ms(self) -> float:
        """Milliseconds of a step that are not the forward's."""
        stats = self.by_task[OVERALL]
        spent = sum(seconds for stage, seconds in stats.seconds.items() if stage not in _NOT_HOST)
        return 1e3 * spent / max(stats.num_steps, 1)

    def __str__(self) -> str:
        cells = [
            f"{task} {stats.tokens_per_step:.2f} ({stats.nodes_per_step:.0f})"
            for task, stats in self.by_task.items()
        ]
        host = f" ({self.host_ms:.2f})" if cells else ""
        return ", ".join([*cells, f"{self.seconds:.1f} s{host}"])

    def figures(self) -> dict[str, Any]:
        """Rounded, for the JSON line."""
        figures = {
            task: [round(stats.tokens_per_step, 3), round(stats.nodes_per_step, 1)]
            for task, stats in self.by_task.items()
        }
        host = {"host_ms": round(self.host_ms, 3)} if figures else {}
        return {"figures": figures, "seconds": round(self.seconds, 3), **host}


def run(options: argparse.Namespace) -> int:
    """Measures each setup in turn, and prints a line for each round."""
    check_at_least(options, 1, "rounds", "samples")
    product_of = options.cache, [None, *options.without], options.temperature, options.max_nodes
    setups = list(starmap(Setup, product(*product_of)))
    if options.remember is not None and len(setups) > 1:
        raise EvalError(
            "--remember must come with one setup, since a second one would know the questions "
            f"(got {len(setups)}); name one width, one temperature and one cache"
        )
    tokenizer = load_tokenizer(options.model)
    prompts = load_questions(options, tokenizer)
    model = load_asked(options, options.weights)
    where = {"dtype": options.dtype, "device": options.device}
    small = load_model(options.draft_model, **where) if options.draft_model else None
    knobs = {"tokenizer": tokenizer, "remember": options.remember, **parsed_knobs(options.knob)}
    knobs |= {} if small is None else {"draft_model": small}
    rows = []

    def measure(name: str, method: Method, temperature: float) -> Iterator[dict[str, Any]]:
        rounds = rounds_of(model, method, prompts, Prompter(tokenizer), options, temperature)
        for number, found in enumerate(rounds):
            which = f", round {number + 1}" if options.rounds > 1 else ""
            print(f"{name}{which}: {found}", flush=True)
            yield {"round": number, **found.figures()}

    for temperature in options.temperature if options.stock else ():
        name = f"{STOCK}, temperature {temperature:g}"
        for row in measure(name, Method(STOCK), temperature):
            rows.append({"method": STOCK, "temperature": temperature, **row})
    for setup in setups:
        method = SelfSpecMethod("selfspec", setup.new_spec(options.sources, **knobs))
        about = {**setup._asdict(), "cache": short_name(setup.cache)}
        rows += [{**about, **row} for row in measure(str(setup), method, setup.temperature)]
    return tell("tokens_per_step", options, num_prompts=len(prompts), rows=rows)


def rounds_of(
    model: Any,
    method: Method,
    prompts: Prompts,
    prompter: Prompter,
    options: argparse.Namespace,
    temperature: float,
) -> Iterator[Round]:
    """What one method took for all prompts, as often as the options say."""
    limits = {"max_new_tokens": options.max_new_tokens, "temperature": temperature}
    for number in range(options.rounds):
        by_task: dict[str, GenerationStats] = defaultdict(GenerationStats)
        answers, start = [], perf_counter()
        for index, (question, ids) in enumerate(prompts):
            rows = ids.to(model.device).expand(options.samples, -1)
            seed = options.seed + index + _SEEDS * number
            answers.append(method.answer(model, rows, seed=seed, **limits)[0, ids.shape[1] :])
            if method.stats is not None:
                by_task[question.task] += method.stats
        seconds = perf_counter() - start
        overall = {OVERALL: sum(by_task.values(), GenerationStats())} if by_task else {}
        yield Round(seconds, {**by_task, **overall})
        if options.edit:
            pairs = zip(prompts, answers, strict=True)
            prompts = [edited(question, answer, prompter) for (question, _), answer in pairs]


def edited(
    question: Question, answer: torch.Tensor, prompter: Prompter
) -> tuple[Question, torch.Tensor]:
    """The chat in which the user wants another word in place of one of the answer's."""
    text = prompter.tokenizer.decode(answer, skip_special_tokens=True)
    words = Counter(word for word in text.split() if word.isalpha() and len(word) > 4)
    (old, _), *_ = words.most_common(1) or [("the", 1)]
    turns = (question.turns[0], _EDIT.format(old=old, new="Amsterdam"))
    question = Question(question.id, question.task, turns)
    return question, torch.tensor([prompter.prompt_ids(question, [text])])


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured on, how it is sampled, and what drafts."""
    add = parser.add_argument
    add_model(parser, dtype="float32", device="cpu")
    rounded = "rounded to 8 or 4 bits, which writes other texts than the model as it is"
    add("--weights", choices=["int8", "int4"], help=rounded)
    add_questions(parser, "the first N prompts", every=EVERY)
    add_length(parser, 128)
    start = "start with each of these caches or Hub ids in turn; cold, the default: with none"
    add("--cache", nargs="+", default=[_COLD], help=start)
    add("--max-nodes", nargs="+", type=int, default=[8, 16, 32, 64], metavar="N")
    greedy = "0: greedy, the default"
    add("--temperature", nargs="+", type=float, default=[0.0], metavar="T", help=greedy)
    add("--seed", type=int, default=0, metavar="N", help="question number n gets seed N + n")
    add("--rounds", type=int, default=1, metavar="N", help="ask everything N times; default: 1")
    add("--samples", type=int, default=1, metavar="N", help="texts of each prompt; default: 1")
    add("--edit", action="store_true", help="ask for the same with another word in the next round")
    add("--stock", action="store_true", help="let stock answer the same prompts first")
    add("--sources", nargs="*", default=list(SOURCE_NAMES), metavar="NAME")
    again = "measure everything again without each of these sources"
    add("--without", nargs="+", default=[], choices=SOURCE_NAMES, metavar="NAME", help=again)
    remember = "start with what earlier runs kept in this file, and keep what this one learns"
    add("--remember", metavar="FILE", help=remember)
    add("--draft-model", metavar="NAME", help="folder or Hub id of a small model")
    add_knob(parser)
