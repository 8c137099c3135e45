"""All that docs/gpu.md tells of a card, in one command: the first one to run on a card.

    python -m eval gpu --model PATH --questions question.jsonl --shapes 1b 7b --out card.jsonl

Prints tables as Markdown: what a token takes with each method, what a forward takes by its width,
many prompts at once, and how many kernels a forward starts. The model runs as it is ("itself") and
grown to each shape. Each cell is written to --out as soon as it is known. A run that was broken off
or that had no more time goes on with its own file, and measures what is missing. A file of another
model, dtype, length, device, version or choice of questions is refused. Without a card the cells
that need one say so.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from eval.benches.prompts import load_questions
from eval.errors import EvalError, one_line
from eval.methods.method import Method, SelfSpecMethod
from eval.methods.names import STOCK
from eval.methods.registry import new_method
from eval.models.loading import load_model, load_tokenizer
from eval.options import add_length, add_questions, check_at_least
from eval.report.table import Table
from eval.runs.captured import decoder_layers, fixed_forward
from eval.runs.environment import tell, versions, where
from eval.runs.many import Many, answered
from eval.runs.timing import timed
from selfspec import SelfSpec

_NO_CARD, _NO_TIME = "no card", "no time"
_ITSELF = "itself"
_TOKEN = "Milliseconds for each new token, prompts included"
_FORWARD = "Milliseconds of a forward, by its number of nodes"
_MANY = "Seconds for 16 prompts"
_KERNELS = "Kernels of a forward over 8 nodes"
_WIDTHS = (1, 2, 8, 16, 32, 64)
_AFTER = (256, 2048)  # Tokens before a forward.
_FORWARDS = 12  # Of which the median counts.
_MANY_PROMPTS, _MANY_ROWS = 16, 8
_NO_DRAFTS: dict[str, Any] = {"max_nodes": 1, "sources": ()}


class Workload(NamedTuple):
    """A model, the prompts (1, L), the most new tokens of each, and stock's texts once known."""

    model: Any
    tokenizer: Any
    prompts: list[torch.Tensor]
    max_new_tokens: int
    stock: list[list[int]]


class Cell(NamedTuple):
    """One measurement: a place in a table, whether it needs a card, and what it gives."""

    table: str
    row: str
    column: str
    needs_card: bool
    measure: Callable[[Workload], str]


class Saved:
    """The cells that are known, by table, model, row and column, in a file with a line for each.

    The first line has what all cells were measured with, and others have stock's texts by model.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path, self.values, self.stock = path, dict[tuple[str, ...], str](), dict[str, Any]()
        lines = path.read_text().splitlines() if path.exists() else []
        first, *others = map(json.loads, lines or ["{}"])
        if not lines:
            self._write({"settings": settings})
        elif (known := first.get("settings", {})) != settings:
            names = [name for name in settings if known.get(name) != settings[name]]
            raise EvalError(
                f"--out must be a new file, or one of the same measurement (got {str(path)!r}, "
                f"with another {', '.join(names)}); name another file"
            )
        for line in others:
            if "cell" in line:
                self.values[tuple(line["cell"])] = line["value"]
            else:
                self.stock |= line["stock"]

    def add(self, cell: tuple[str, ...], value: str, stock: list[list[int]]) -> None:
        """Writes a cell before anything else is measured, and the texts of stock when new."""
        self.values[cell] = value
        if stock and self.stock.get(cell[1]) != stock:
            self.stock[cell[1]] = stock
            self._write({"stock": {cell[1]: stock}})
        self._write({"cell": cell, "value": value})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run(options: argparse.Namespace) -> int:
    """Measures what is not known yet, and prints the tables and the JSON line."""
    check_at_least(options, 1, "max_new_tokens", "limit")
    check_at_least(options, 0, "minutes")
    if options.questions is None:
        raise EvalError("--questions must name the file of Spec-Bench (got none)")
    end = monotonic() + 60 * options.minutes
    saved, missing = Saved(options.out, _settings(options)), dict[tuple[str, ...], str]()
    tokenizer = load_tokenizer(options.model)
    prompts = [ids for _, ids in load_questions(options, tokenizer)]
    for shape in (_ITSELF, *options.shapes):
        load = partial(_loaded, options, shape)
        missing |= _measured(shape, load, (tokenizer, prompts), options, saved, end)
    values = {**missing, **saved.values}
    for table in _tables(values):
        print(table.markdown() + "\n")
    cells = [{"cell": cell, "value": value} for cell, value in values.items()]
    return tell("gpu", options, cells=cells, card=_card())


def _measured(
    shape: str,
    load: Callable[[], Any],
    given: tuple[Any, list[torch.Tensor]],
    options: argparse.Namespace,
    saved: Saved,
    end: float,
) -> dict[tuple[str, ...], str]:
    """Measures and saves the cells of one model; returns those that have no figure, and why."""
    reasons, workload = dict[tuple[str, ...], str](), None
    for cell in CELLS:
        key = (cell.table, shape, cell.row, cell.column)
        if key in saved.values:
            continue
        if cell.needs_card and _card() is None:
            reasons[key] = _NO_CARD
        elif monotonic() > end:
            reasons[key] = _NO_TIME
        else:
            try:
                if workload is None:
                    stock = list(saved.stock.get(shape, []))
                    workload = Workload(load(), *given, options.max_new_tokens, stock)
                    print(f"{shape}: {json.dumps(where(workload.model))}", flush=True)
                saved.add(key, cell.measure(workload), list(workload.stock))
            except Exception as error:  # Such as no memory: the other cells go on.
                reasons[key] = one_line(error)
            print(*key, saved.values.get(key) or reasons[key], sep=" | ", flush=True)
    del workload
    gc.collect()
    return reasons


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """All that a cell depends on but for its shape."""
    names = ("model", "dtype", "device", "max_new_tokens", "task", "limit", "every", "offset")
    chosen = {name: getattr(options, name) for name in names}
    questions = sha256(options.questions.read_bytes()).hexdigest()
    return {**chosen, "questions": questions, "card": _card(), **versions()}


def _loaded(options: argparse.Namespace, shape: str) -> Any:
    device = options.device or ("cuda" if _card() else "cpu")
    grown = None if shape == _ITSELF else shape
    return load_model(options.model, dtype=options.dtype, device=device, shape=grown)


def _card() -> str | None:
    """The card's name and the version of CUDA; None without one."""
    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def _tables(values: dict[tuple[str, ...], str]) -> Iterator[Table]:
    """A table for each title; models are rows, after what a row tells of them."""
    for title in dict.fromkeys(table for table, *_ in values):
        cells = {tuple(key): value for (table, *key), value in values.items() if table == title}
        columns = sorted({column for *_, column in cells}, key=_COLUMNS.index)
        rows = dict.fromkeys((row, model) for model, row, _ in cells)
        body = [
            [row, model, *(cells.get((model, row, column), "") for column in columns)]
            for row, model in sorted(rows, key=lambda each: _ORDER.index(each[0]))
        ]
        yield Table(title, ["what", "model", *columns], body)


def _answers(method: Method, workload: Workload) -> tuple[float, list[list[int]]]:
    """The milliseconds of a token, and the texts; the first prompt, with its captures, is out."""
    if reason := method.refusal(workload.model):
        raise EvalError(reason)
    seconds, texts = [], []
    for prompt in workload.prompts:
        limits: dict[str, Any] = {
            "max_new_tokens": workload.max_new_tokens,
            "temperature": 0.0,
            "seed": 0,
        }
        ids = prompt.to(workload.model.device)
        run = partial(method.answer, workload.model, ids, **limits)
        result = timed(workload.model, partial(_without_streamer, run))
        texts.append(result.output[0, ids.shape[1] :].tolist())
        seconds.append(result.seconds)
    counted = slice(1 if len(texts) > 1 else 0, None)
    return 1000 * sum(seconds[counted]) / sum(map(len, texts[counted])), texts


def _without_streamer(run: Callable[[], torch.Tensor], _streamer: object) -> torch.Tensor:
    return run()


def _by_stock(name: str, workload: Workload) -> str:
    ms, texts = _answers(new_method(name), workload)
    if name == STOCK:
        workload.stock[:] = texts
    return f"{ms:.2f}{_same(texts, workload)}"


def _by_us(knobs: dict[str, Any], kind: str | None, workload: Workload) -> str:
    """Of a `SelfSpec` with these knobs; refuses another kind of forward than was asked for."""
    spec = SelfSpec(**knobs)
    ms, texts = _answers(SelfSpecMethod("ours", spec), workload)
    if kind is not None and spec.stats.forward != kind:
        raise EvalError(f"forwards were {spec.stats.forward}: {spec.stats.eager_reason}")
    step = sum(spec.stats.seconds.values()) - spec.stats.seconds["forward"]
    beside = 1000 * step / max(spec.stats.num_steps, 1)
    told_more = f"; {spec.stats.tokens_per_step:.2f} tokens a step, {beside:.2f} ms beside"
    return f"{ms:.2f}{_same(texts, workload)}{told_more}"


def _same(texts: list[list[int]], workload: Workload) -> str:
    """How many texts are stock's, if stock was measured in this run."""
    if not workload.stock:
        return ""
    return f" ({sum(map(list.__eq__, texts, workload.stock))} of {len(texts)} texts)"


def _forward_ms(width: int, num_tokens: int, workload: Workload) -> str:
    seconds = []
    forward = fixed_forward(workload.model, width, num_tokens, captures=True)
    for _ in range(_FORWARDS):
        start = perf_counter()
        forward()[0, 0, 0].item()  # Which waits for the device.
        seconds.append(perf_counter() - start)
    return f"{1000 * median(seconds):.2f}"


def _many(way: str, workload: Workload) -> str:
    prompts = [
        workload.prompts[n % len(workload.prompts)][0].tolist() for n in range(_MANY_PROMPTS)
    ]
    limits = workload.max_new_tokens, _MANY_ROWS, None
    many = Many(workload.model, workload.tokenizer, prompts, *limits, knobs={})
    return f"{max(answered(way, many).ends):.2f}"


def _kernels(workload: Workload) -> str:
    """Kernels that one forward starts when it is not replayed, all and by layer."""
    forward = fixed_forward(workload.model, 8, _AFTER[0], captures=False)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        forward()
    kernels = sum(event.device_type.name == "CUDA" for event in profiler.events())
    return f"{kernels}, {kernels / len(decoder_layers(workload.model)):.1f} a layer"


def _ours(row: str, needs_card: bool, kind: str | None, **knobs: Any) -> Cell:
    if kind == "graph":
        knobs["forward"] = "graph"
    return Cell(_TOKEN, row, "ms", needs_card, partial(_by_us, knobs, kind))


def _of_stock(row: str, name: str, needs_card: bool = False) -> Cell:
    return Cell(_TOKEN, row, "ms", needs_card, partial(_by_stock, name))


def _by_width() -> Iterator[Cell]:
    for after, width in product(_AFTER, _WIDTHS):
        measure = partial(_forward_ms, width, after)
        yield Cell(_FORWARD, f"after {after} tokens", str(width), False, measure)


def _of_width(nodes: int) -> Cell:
    knobs = {"budget": "fixed", "max_nodes": nodes}
    return _ours(f"at most {nodes} nodes, fixed, by graphs", True, "graph", **knobs)


_BY_GRAPHS = _ours("selfspec, by graphs", True, "graph")
_ROWS = Cell(_MANY, "selfspec, rows that come and go", "seconds", False, partial(_many, "arrival"))
CELLS = (  # What is worth most comes first.
    _of_stock("plain generate()", STOCK),
    _BY_GRAPHS,
    _ours("selfspec without drafts, by graphs", True, "graph", **_NO_DRAFTS),
    *_by_width(),
    Cell(_KERNELS, "not replayed", "kernels", True, _kernels),
    *map(_of_width, (8, 16, 32)),
    _ours("selfspec, run eagerly", False, "eager", forward="eager"),
    _of_stock("transformers' prompt lookup", "prompt-lookup"),
    _ROWS,
    Cell(_MANY, "plain generate(), sorted batches", "seconds", False, partial(_many, STOCK)),
    _of_stock("static cache, compiled", "stock-static", needs_card=True),
)
_ORDER = [cell.row for cell in CELLS]
_COLUMNS = [cell.column for cell in CELLS]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="a small Llama's folder")
    add("--shapes", nargs="*", default=[], metavar="SHAPE", help="grown to them, too: 1b 7b")
    add("--dtype", default="bfloat16", help="default: %(default)s")
    add("--device", help="default: the card, or else the CPU")
    add("--minutes", type=float, default=12, metavar="N", help="begin nothing later; default: 12")
    add("--out", type=Path, required=True, metavar="FILE", help="keeps each cell; go on with it")
    add_questions(parser, "the first N of those that are left")
    add_length(parser, 128)
    parser.set_defaults(limit=6)
