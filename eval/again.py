"""The same questions again: how many tokens a forward yields, and how long it takes, each time.

    python -m eval again --model PATH --questions question.jsonl --max-nodes 8 16 --without texts

One `SelfSpec`, cold at the start, is kept over all rounds of a way:

  greedy   the same prompts, greedily: a retry, an evaluation or a batch file that is run again
  sampled  the same prompts at --temperature, each time with other seeds: answers that are
           regenerated
  samples  --samples texts of each prompt in one batch, at --temperature, with other seeds each time
  edited   greedily; the second time the chat goes on, and the user asks for the answer again, with
           one of its words replaced by another

Each width is measured with all sources, and without each that `--without` names. A cell has the
tokens a step of a round, its seconds, and in brackets the milliseconds of a step that are not the
forward's. With --stock, stock answers such prompts too. Trees take all the nodes that they
may, unless --knob names another budget. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.benches.dialogue import Prompter
from eval.benches.prompts import Prompts, load_questions
from eval.benches.questions import Question
from eval.methods.method import Method, SelfSpecMethod
from eval.models.loading import load_asked, load_tokenizer
from eval.options import EVERY, add_knob, add_length, add_model, add_questions, parsed_knobs
from eval.runs.environment import tell
from selfspec import GenerationStats, SelfSpec
from selfspec.config import SOURCE_NAMES

WAYS = ("greedy", "sampled", "samples", "edited")
_NOT_HOST = {"forward", "prefill", "prepare"}
_EDIT = "Write this again, with {new!r} in place of {old!r}, and change nothing else."


class Round(NamedTuple):
    """What all questions took once; `stats` are None for stock."""

    seconds: float
    stats: GenerationStats | None

    def figures(self) -> dict[str, float]:
        """Rounded, for the JSON line."""
        if self.stats is None:
            return {"seconds": round(self.seconds, 3)}
        steps, spent = max(self.stats.num_steps, 1), self.stats.seconds.items()
        host = sum(seconds for stage, seconds in spent if stage not in _NOT_HOST)
        return {
            "seconds": round(self.seconds, 3),
            "tokens_per_step": round(self.stats.tokens_per_step, 3),
            "host_ms": round(1e3 * host / steps, 3),
        }


class Asked(NamedTuple):
    """A model, the prompts, and how they are put in one way."""

    model: Any
    prompts: Prompts
    prompter: Prompter
    way: str
    options: argparse.Namespace

    def rounds(self, method: Method) -> Iterator[Round]:
        """All questions, as often as the options say."""
        prompts = [(*prompt, self.options.seed + n) for n, prompt in enumerate(self.prompts)]
        for _ in range(self.options.rounds):
            answers, start, stats = [], perf_counter(), GenerationStats()
            for _, ids, seed in prompts:
                answers.append(self._answer(method, ids, seed)[0, ids.shape[1] :])
                stats += method.stats or GenerationStats()
            yield Round(perf_counter() - start, stats if stats.num_calls else None)
            prompts = list(map(self._next, prompts, answers))

    def _answer(self, method: Method, ids: torch.Tensor, seed: int) -> torch.Tensor:
        is_drawn = self.way in ("sampled", "samples")
        num = self.options.samples if self.way == "samples" else 1
        return method.answer(
            self.model,
            ids.to(self.model.device).expand(num, -1),
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature if is_drawn else 0.0,
            seed=seed,
        ).cpu()

    def _next(self, prompt: tuple[Question, torch.Tensor, int], answer: torch.Tensor) -> Any:
        """What is asked in the next round in place of a prompt."""
        question, ids, seed = prompt
        if self.way == "edited":
            text = self.prompter.tokenizer.decode(answer, skip_special_tokens=True)
            turns = (question.turns[0], _edit(text))
            question = Question(question.id, question.task, turns)
            ids = torch.tensor([self.prompter.prompt_ids(question, [text])])
        return question, ids, seed + 1000


def run(options: argparse.Namespace) -> int:
    """Measures each way with each width, and prints a line for each."""
    tokenizer = load_tokenizer(options.model)
    prompts, prompter = load_questions(options, tokenizer), Prompter(tokenizer)
    model, rows = load_asked(options), []
    for way in options.ways:
        asked = Asked(model, prompts, prompter, way, options)
        if options.stock:
            rows.append(_shown(asked, Method("stock"), {"way": way, "method": "stock"}))
        for nodes, without in product(options.max_nodes, [None, *options.without]):
            sources = [name for name in SOURCE_NAMES if name != without]
            knobs = {"budget": "fixed", "max_nodes": nodes, "sources": sources}
            spec = SelfSpec(**{**knobs, **parsed_knobs(options.knob)})
            setup = {"way": way, "max_nodes": nodes, "without": without}
            rows.append(_shown(asked, SelfSpecMethod("selfspec", spec), setup))
    return tell("again", options, num_prompts=len(prompts), rows=rows)


def _shown(asked: Asked, method: Method, setup: dict[str, Any]) -> dict[str, Any]:
    """Measures one method, and prints what each round took."""
    found = [each.figures() for each in asked.rounds(method)]
    cells = [
        f"{each['tokens_per_step']:.2f} in {each['seconds']:.1f} s ({each['host_ms']:.2f})"
        if "host_ms" in each
        else f"{each['seconds']:.1f} s"
        for each in found
    ]
    name = ", ".join(f"{key} {value}" for key, value in setup.items() if value is not None)
    print(f"{name}: {', '.join(cells)}", flush=True)
    return {**setup, "rounds": found}


def _edit(text: str) -> str:
    """What a user says who wants another word in place of the answer's most frequent long one."""
    words = Counter(word for word in text.split() if word.isalpha() and len(word) > 4)
    (old, _), *_ = words.most_common(1) or [("the", 1)]
    return _EDIT.format(old=old, new="Amsterdam")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser, required=True, dtype="float32", device="cpu")
    add_questions(parser, "the first N prompts", every=EVERY)
    add_length(parser, 96)
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY", help="of the above")
    add("--rounds", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--samples", type=int, default=8, metavar="N", help="of a prompt; default: %(default)s")
    add("--temperature", type=float, default=0.7, metavar="T", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="question number n gets seed N + n")
    add("--max-nodes", nargs="+", type=int, default=[8, 16], metavar="N")
    again = "measure everything again without each of these sources"
    add("--without", nargs="+", default=[], choices=SOURCE_NAMES, metavar="NAME", help=again)
    add("--stock", action="store_true", help="let stock answer the same prompts first")
    add_knob(parser)
