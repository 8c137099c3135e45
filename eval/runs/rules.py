"""EdgeLLM's rules for drafting with a small model, compared on a real pair of models.

Three ways to grow a tree of the same size: as a chain, best-first, and by the paper's pacer. Then
the self-adaptive threshold, as it is written and as selfspec has it, over initial values and over
the factor by which it falls (figure 12). The large model writes each answer once; then only the
draft model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eval.benches.prompts import Prompts
from eval.methods.draft_rules import Counted, Fallback, Rule, drafted
from eval.report.table import Table
from selfspec import SpecConfig
from selfspec.records import Likely
from selfspec.run.draft_model import DraftModel, DraftText

_MOST = 32  # Nodes of a tree that only a threshold ends.
_STARTS = (0.1, 0.01, 0.001)
_FACTORS = (0.1, 0.5, 0.9)


def compared(
    model: Any,
    draft_model: Any,
    prompts: Prompts,
    widths: Sequence[int],
    max_new_tokens: int,
    told: Callable[[str], None],
) -> dict[str, Counted]:
    """What came of each rule over all texts, by its name."""
    texts = [_written(model, ids, max_new_tokens) for _, ids in prompts]
    found: dict[str, Counted] = {}
    for name, rule in _rules(widths).items():
        found[name] = Counted()
        for prompt, text in texts:
            found[name] += drafted(_TreeReader(draft_model), prompt, text, rule)
        told(f"{name}: {found[name].tokens_per_step:.2f} tokens a step")
    return found


def _rules(widths: Sequence[int]) -> dict[str, Rule]:
    """Each is used once: a threshold goes on from question to question."""
    orders = ("chain", "best-first", "pacer")
    rules = {f"{order}, {width} nodes": Rule(width, order) for width in widths for order in orders}
    swept = [(start, 0.5) for start in _STARTS]
    swept += [(0.01, factor) for factor in _FACTORS if factor != 0.5]
    for start, factor in swept:
        fallback = Fallback(as_written=True, value=start, factor=factor)
        rules[f"threshold from {start:g}, times {factor:g}"] = Rule(_MOST, fallback=fallback)
    rules["threshold as selfspec has it"] = Rule(_MOST, fallback=Fallback(as_written=False))
    return rules


def _written(model: Any, ids: torch.Tensor, max_new_tokens: int) -> tuple[list[int], list[int]]:
    """A prompt and what the large model answers, greedily."""
    asked = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    output = model.generate(ids, **asked, max_new_tokens=max_new_tokens)[0].tolist()
    return output[: ids.shape[1]], output[ids.shape[1] :]


class _TreeReader:
    """Reads the nodes of a tree behind a text, each with the path to it; the text's end is 0."""

    def __init__(self, model: Any) -> None:
        sizes = {"num_ids": model.config.vocab_size, "top_k": SpecConfig().top_k}
        self._text = DraftText(DraftModel(model, **sizes))
        self._paths: list[list[int]] = [[]]

    def extend(self, token_ids: Sequence[int]) -> Likely:
        """Reads further tokens of the text."""
        self._paths = [[]]
        return self._text.read(token_ids)

    def look(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[Likely]:
        """Reads nodes, which are forgotten at once."""
        found = []
        for token, parent in zip(token_ids, parents, strict=True):
            path = [*self._paths[parent], token]
            found.append(self._text.read(path))
            self._text.crop(len(path))
            self._paths.append(path)
        return found

    def keep(self, path: Sequence[int]) -> None:
        """Makes the nodes of a path text."""
        if ids := self._paths[path[-1]]:
            self._text.read(ids)
        self._paths = [[]]


def rules_table(found: dict[str, Counted], cost: float) -> Table:
    """Means of a step, and the speed-up if a forward of the draft model has this cost."""
    head = ["rule", "tokens a step", "nodes", "their scores", "draft forwards", "speed-up"]
    rows = [
        [name, *(f"{number:.2f}" for number in (*each.means, each.speed_up(cost)))]
        for name, each in found.items()
    ]
    share = sum(each.num_first for each in found.values())
    share /= sum(each.num_steps for each in found.values())
    note = (
        "Scores are products of the draft model's probabilities: their sum is how many drafts "
        f"should come true. It names a step's first token first in {share:.0%} of the steps. The "
        f"speed-up is over plain steps, if a forward of it takes {cost:g} of one."
    )
    return Table("Rules for a draft model", head, rows, note)
