"""The options that the commands of `python -m eval` share, and what its `--help` says.

Imports nothing heavy, so that help is there at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.methods.names import DESCRIPTIONS, FORWARD_ONLY, OURS, STOCK
from eval.methods.studies import STUDIES

MEASURING_SET = "--measuring-set"
EVERY = 10  # Of a task's questions, the 1st, 11th, 21st, … are measured.
MAX_PROMPT_TOKENS = 1300

_RUN = """\
Answers the questions of a bench with several decoding methods, question by question in turns, and
writes all that it measured to --output: rows.jsonl, summary.json, report.md and report.html.

  python -m eval run --bench code-stdlib --output out
  python -m eval run --model your/model --bench spec-bench --questions question.jsonl --output out

A run that was stopped goes on where it was when it is started again with the same options; a
higher --limit makes it longer. The exit status is 1 where an answer failed.

  python -m eval run --measuring-set --model your/model --questions question.jsonl

answers the measuring set of Spec-Bench, also by forward-only: selfspec's forwards without drafts.
"""
_BENCHES = """\
benches:
  spec-bench, mt-bench   their question.jsonl, named by --questions (mt-bench also through datasets)
  speed-bench            11 categories, through datasets or a file; also as speed-bench-1k, -2k,
                         -8k, -16k and -32k, its prompts of that many tokens
  humaneval, gsm8k, mbpp through the datasets package, or a local file named by --questions
  code-stdlib            completion, edit and docstring tasks cut from Python's own library, offline
  random                 texts of random tokens, which no draft can guess
  FILE.jsonl             your own: {"turns": ["…", "…"]} or {"prompt": "…"} a line
methods:
"""
_STUDY = """\
Runs one method with different knobs, all of them interleaved as in 'run', and reports on each:

"""
_FIT = """\
Answers questions twice, counts how often the candidate at each depth and rank was right, and puts
the tree with the most tokens a second on this machine into a file, for method ghidorah.
"""


def check_at_least(options: Any, least: float, *names: str) -> None:
    """Refuses an option that is below its least value; one that was not given is left alone."""
    for name in names:
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not value >= least:
                raise EvalError(f"--{name.replace('_', '-')} must be >= {least} (got {value})")


def drafting_knobs(options: argparse.Namespace) -> dict[str, Any]:
    """The knobs that were named; all others are `SpecConfig`'s own."""
    named = {"max_nodes": options.max_nodes, "budget": options.budget}
    given = {name: value for name, value in named.items() if value is not None}
    return {**given, **parsed_knobs(options.knob)}


def checked_knobs(options: argparse.Namespace) -> dict[str, Any]:
    """The same, and a wrong one is refused before anything starts."""
    from selfspec.config import SpecConfig

    knobs = drafting_knobs(options)
    SpecConfig.of(**knobs)
    return knobs


def parsed_knobs(knobs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs; values are JSON where they parse as such."""
    parsed: dict[str, Any] = {}
    for knob in knobs:
        name, _, value = knob.partition("=")
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="--output of a run")
    pictures = "also write each picture to this folder, as an SVG file"
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=pictures)


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, help="--output of a run")
    parser.add_argument("b", type=Path, help="that of the other one")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = _RUN
    parser.epilog = _BENCHES + described()
    _add_bench(parser)
    every = f"every {EVERY}th question of spec-bench, first turns of at most {MAX_PROMPT_TOKENS}"
    help_ = f"{every} tokens, in their order"
    parser.add_argument(MEASURING_SET, action="store_true", help=help_)
    add_methods(parser)
    add_run_options(parser)


def measuring_set() -> dict[str, Any]:
    """The options of a run over it."""
    slice_ = {"every": EVERY, "turns": 1, "max_prompt_tokens": MAX_PROMPT_TOKENS, "in_order": True}
    methods = (STOCK, "prompt-lookup", FORWARD_ONLY, OURS)
    return {"bench": "spec-bench", "methods": methods, **slice_}


def add_study(parser: argparse.ArgumentParser) -> None:
    names = (f"  {name:<9} {study.title} ({study.after})" for name, study in STUDIES.items())
    parser.description = _STUDY + "\n".join(names)
    parser.add_argument("name", help="one of those above")
    caches = "for 'starts': caches or Hub ids to compare"
    parser.add_argument("--caches", nargs="+", default=[], metavar="CACHE", help=caches)
    _add_bench(parser)
    add_run_options(parser)


def add_fit(parser: argparse.ArgumentParser) -> None:
    parser.description = _FIT
    add_model(parser, dtype="float32", device="cpu")
    add_questions(parser, "the first N prompts")
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="a new file for the tree")
    add("--cache", metavar="CACHE", help="start with what this cache or Hub id holds")
    add("--width", type=int, metavar="N", help="keep this number of nodes; default: the fastest")
    add_length(parser, 128)


def _add_bench(command: Any) -> None:
    add = command.add_argument
    add("--output", type=Path, metavar="DIR", help="where all results go; none: they are shown")
    add("--bench", help="a bench that 'run' names, or FILE.jsonl")


_METHODS = (STOCK, "prompt-lookup", OURS)


def described() -> str:
    """What each method is, in a line."""
    return "\n".join(f"  {name:<18} {line}" for name, line in DESCRIPTIONS.items())


class _Names(argparse.Action):
    """Names, set apart by commas or spaces; ``list`` says what each is, and ends the command."""

    def __call__(self, parser: Any, options: Any, values: Any, option: Any = None) -> None:
        names = tuple(name.strip() for text in values for name in text.split(",") if name.strip())
        if names == ("list",):
            print(described())
            parser.exit()
        setattr(options, self.dest, names)


def add_methods(command: Any, default: Sequence[str] = _METHODS) -> None:
    help_ = f"names with commas or spaces; list: what there is; default: {' '.join(default)}"
    names = {"nargs": "+", "action": _Names, "metavar": "NAME", "help": help_}
    command.add_argument("--methods", default=tuple(default), **names)


def add_run_options(command: Any) -> None:
    """All that a run can be told but for its bench, its methods and where results go."""
    model = command.add_argument_group("which model")
    add_model(model)
    rounded = "rounded to 8 or 4 bits, which is another text; stock runs it without drafts"
    model.add_argument("--weights", choices=["int8", "int4"], help=rounded)
    where = "of 'openvino': a Python that has it, and the model that optimum-cli has exported"
    model.add_argument("--openvino", nargs=2, metavar=("PYTHON", "FOLDER"), help=where)
    small = "the small model of methods 'assisted' and 'edgellm'"
    model.add_argument("--assistant-model", "--assistant", metavar="MODEL", help=small)
    limit = "ask N questions, spread over the tasks"
    add_questions(command.add_argument_group("which questions"), limit)
    add = command.add_argument_group("how they are put").add_argument
    add(
        "--turns",
        type=int,
        metavar="N",
        help="of a dialogue, at most; default: %(default)s (None: all)",
    )
    longest = "leave out longer first prompts; default: %(default)s (None: none)"
    add("--max-prompt-tokens", type=int, metavar="N", help=longest)
    formats = "chat: the tokenizer's template. plain: text to go on with. auto: what fits"
    add("--prompt-format", default="auto", help=formats)
    group = command.add_argument_group("how they are answered")
    add_length(group, 128)
    add = group.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0: greedy, the default")
    add("--seed", type=int, default=0, metavar="N", help="question number n gets seed N + n")
    rounds = "answer everything N times, from the same state each time; default: %(default)s"
    add("--rounds", type=int, default=1, metavar="N", help=rounds)
    group = command.add_argument_group("what drafters know, and how they draft")
    add = group.add_argument
    add("--cache", metavar="CACHE", help="prebuilt state: start with this cache or Hub id")
    store = "of 'rest': a file of texts, with blank lines between them"
    add("--datastore", type=Path, metavar="FILE", help=store)
    add("--tree", metavar="FILE", help="of 'fit': the tree of method 'ghidorah'")
    add("--warm-up", type=int, default=0, metavar="N", help="answer N other questions first")
    add_drafting(group)
    command.set_defaults(in_order=False)


def add_model(
    group: Any, *, required: bool = False, dtype: str = "auto", device: str = "auto"
) -> None:
    """Which model, where, in which dtype, and on how many threads."""
    add = group.add_argument
    embedded = "" if required else "; default: the embedded one, which writes Python code"
    add("--model", required=required, metavar="MODEL", help=f"folder or Hub id{embedded}")
    shape = "grow a small Llama to this shape first, such as 135m: see 'eval grow'"
    add("--shape", help=shape)
    dtypes = "float32, bfloat16, float16; auto: the checkpoint's own; default: %(default)s"
    add("--dtype", default=dtype, help=dtypes)
    devices = "cpu, cuda, …; auto: a GPU if any; default: %(default)s"
    add("--device", default=device, help=devices)
    threads = "of the CPU; default: %(default)s (None: torch's own number)"
    add("--threads", type=int, metavar="N", help=threads)


def add_length(group: Any, default: int) -> None:
    """How long an answer may be."""
    help_ = "of an answer, at most; default: %(default)s"
    group.add_argument("--max-new-tokens", type=int, default=default, metavar="N", help=help_)


def add_questions(group: Any, limit: str, every: int = 1) -> None:
    """A file of questions, and which of them; `limit` says what a number of them takes."""
    add = group.add_argument
    add("--questions", type=Path, metavar="FILE", help="a local file of the bench")
    add("--limit", type=int, metavar="N", help=limit)
    add("--task", help="questions of this task alone")
    nth = "every Nth question of each task; default: %(default)s"
    add("--every", type=int, default=every, metavar="N", help=nth)
    add("--offset", type=int, default=0, metavar="N", help="which of the N, from 0; default: 0")


def add_drafting(group: Any) -> None:
    """The knobs of `SpecConfig`; what is not named is as it has it."""
    add = group.add_argument
    add("--max-nodes", type=int, metavar="N", help="nodes of a draft tree")
    add("--budget", help="measured: as many of --max-nodes as pay; fixed: all")
    add_knob(group)


def add_knob(group: Any) -> None:
    """The knobs that have no option of their own."""
    more = "any other knob of SpecConfig"
    group.add_argument("--knob", nargs="*", default=[], metavar="NAME=VALUE", help=more)
