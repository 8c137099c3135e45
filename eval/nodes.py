"""What a forward over a tree costs by its nodes, of models with running states and of others.

    python -m eval nodes --random qwen3.5-0.8b llama-0.8b --vocabulary 32000 --dtype bfloat16
    python -m eval nodes --random llama-0.8b --after 256 2048 8192 --dtype bfloat16

Random models of these sizes take turns, forward by forward, with packed weights if that pays. A
forward is laid out, run over a tree in which each node has two children, and the path of two nodes
is kept. Printed are the medians, and what each width costs in forwards of one node. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch

from eval.models.hybrid import SHAPES, random_model
from eval.options import check_at_least
from eval.report.table import Table
from eval.runs.environment import tell, where
from selfspec.ability.look import look_at
from selfspec.ability.readings import prefilled
from selfspec.ability.trial_layers import TrialLayers
from selfspec.config import SpecConfig
from selfspec.forward.backends import TreeBackend
from selfspec.records import DraftTree
from selfspec.runner import ModelRunner
from selfspec.weights.packing import pack

_NUM_PROMPT = 32
_WARM_UP = 3  # The first rounds do not count.


class Case:
    """A random model after a text, and the milliseconds of its forwards by their nodes.

    Longer texts are the first few columns again and again, since only their number matters.
    """

    def __init__(self, model: Any, name: str, length: int, stack: ExitStack) -> None:
        self.name = name
        self.model = model
        self.runner = ModelRunner(model, SpecConfig())
        support = self.runner.support()
        assert support.mode == "tree", support.reason
        backend = stack.enter_context(self.runner.backend(look_at(model), support))
        assert isinstance(backend, TreeBackend)
        self.backend = backend
        self.num_ids = model.config.vocab_size
        with torch.no_grad():
            kv = prefilled(model, [5] * _NUM_PROMPT, TrialLayers())
            for layer in kv.layers:
                if getattr(layer, "keys", None) is not None:
                    layer.keys = layer.keys.repeat(1, 1, length // _NUM_PROMPT, 1)
                    layer.values = layer.values.repeat(1, 1, length // _NUM_PROMPT, 1)
            self.rows = self.backend.add(kv, torch.tensor([[length]]))
        self.times: dict[int, list[float]] = {}

    def step(self, num_nodes: int, dice: random.Random) -> None:
        tree = DraftTree.of_root(5)
        for node in range(1, num_nodes):
            tree.add((node - 1) // 2, dice.randrange(5, self.num_ids), 0.5)
        with torch.no_grad(), self.runner.decoding():
            start = perf_counter()
            self.backend.lay_out(self.rows, [tree])()
            self.backend.kv.commit([[0, 1][:num_nodes]])
            self.times.setdefault(num_nodes, []).append(1e3 * (perf_counter() - start))

    def figures(self) -> dict[str, Any]:
        times = {number: median(some[_WARM_UP:]) for number, some in self.times.items()}
        return {"ms": times, "costs": {number: time / times[1] for number, time in times.items()}}


def run(options: argparse.Namespace) -> int:
    """Measures all models, and prints a table and the JSON line."""
    check_at_least(options, 1, "rounds")
    check_at_least(options, _NUM_PROMPT, "after")
    if options.threads:
        torch.set_num_threads(options.threads)
    dice, widths = random.Random(0), sorted({1, *options.nodes})
    with ExitStack() as stack:
        cases = [case for name in options.random for case in _cases(name, options, stack)]
        for _ in range(_WARM_UP + options.rounds):
            for number in widths:
                for case in cases:
                    case.step(number, dice)
        found = {case.name: case.figures() for case in cases}
        print(_table(found, widths).markdown())
        return tell("nodes", options, **where(cases[0].model), models=found)


def _cases(name: str, options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    model = random_model(
        name, None, dtype=options.dtype, device="cpu", vocab_size=options.vocabulary
    )
    pack(model)
    for length in options.after:
        length = length // _NUM_PROMPT * _NUM_PROMPT
        yield Case(model, f"{name}, after {length} tokens", length, stack)


def _table(found: dict[str, dict[str, Any]], widths: Iterable[int]) -> Table:
    head = ["model", *(f"{number} nodes" for number in widths)]
    rows = [
        [name, *(f"{result['ms'][n]:.1f} ms ({result['costs'][n]:.2f})" for n in widths)]
        for name, result in found.items()
    ]
    return Table("Forwards over trees", head, rows, "In brackets: in forwards of one node.")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--random", nargs="+", default=["qwen3.5-0.8b", "llama-0.8b"], choices=SHAPES)
    add("--vocabulary", type=int, metavar="N", help="of all of them; default: their own")
    add("--nodes", type=int, nargs="+", default=[4, 8, 16], metavar="N", help="of the trees")
    add("--after", type=int, nargs="+", default=[_NUM_PROMPT], metavar="N", help="tokens of text")
    add("--rounds", type=int, default=15, metavar="N", help="default: %(default)s")
    add("--dtype", default="float32", help="float32, bfloat16 or float16; default: %(default)s")
    add("--threads", type=int, metavar="N", help="of the CPU; default: torch's own number")
