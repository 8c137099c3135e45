"""How often each kind of evidence comes true on real text: what a new session starts from.

    python -m eval.count_rates --model PATH --questions question.jsonl --offset 5 --out FILE

Answers each question with a `SelfSpec` that knows nothing, greedily and at each of the given
temperatures, and counts below every accepted node which candidate was the model's own token. The
file is what `selfspec/draft/rates.json` holds: for each kind that was tried often enough, its
evidence, how often it was tried, and how often it was right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import selfspec
from eval.errors import exit_status
from eval.methods.method import sampling
from eval.options import described
from eval.tokens_per_step import add_options, load
from selfspec.records import StepRecord

_LEAST_TRIALS = 30


class _Counts:
    """Trials and hits by kind of evidence."""

    def __init__(self) -> None:
        self.trials: Counter[Any] = Counter()
        self.hits: Counter[Any] = Counter()

    def __call__(self, record: StepRecord) -> None:
        for node, token in zip(record.path, record.committed_ids, strict=False):
            siblings = record.tree.looked_at[node]
            if siblings is not None:
                self.trials.update(siblings.evidence)
                self.hits.update(
                    kinds
                    for candidate, kinds in zip(siblings.tokens, siblings.evidence, strict=True)
                    if candidate == token
                )

    def rows(self) -> list[list[Any]]:
        """[[evidence, …], hits, trials] of what was tried often enough, in a fixed order."""
        known = sorted(kinds for kinds, number in self.trials.items() if number >= _LEAST_TRIALS)
        return [[list(map(list, k)), self.hits[k], self.trials[k]] for k in known]


def main(argv: Sequence[str] | None = None) -> int:
    """Counts, and writes the file."""
    options = _options(argv)
    return exit_status(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    model, prompts = load(options)
    counts = _Counts()
    for temperature in options.temperatures:
        for index, (question, input_ids) in enumerate(prompts):
            spec = selfspec.SelfSpec(max_nodes=options.max_nodes[0], budget="fixed")
            torch.manual_seed(options.seed + index)
            with spec.listening(counts):
                model.generate(
                    input_ids.to(model.device),
                    attention_mask=torch.ones_like(input_ids).to(model.device),
                    custom_generate=spec,
                    max_new_tokens=options.max_new_tokens,
                    **sampling(temperature),
                )
            print(f"{question.task} at temperature {temperature}: {spec.stats}", file=sys.stderr)
    lines = ",\n".join(map(json.dumps, counts.rows()))
    options.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(counts.rows())} kinds of evidence, {counts.trials.total()} trials: {options.out}")
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = described("count_rates", __doc__)
    add_options(parser)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7, 1.0])
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.set_defaults(max_nodes=[16])
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
