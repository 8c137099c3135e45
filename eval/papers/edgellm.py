"""EdgeLLM: a small model drafts a tree while it has memory to itself, and stops when it is unsure.

"EdgeLLM: Fast On-Device LLM Inference With Speculative Decoding" (IEEE TMC 2025). The target does
not fit into memory and is read layer by layer, so one verification takes the time of many drafts by
a small LLM that stays in memory. A branch i of the tree has T_i tokens and the confidence C_i, the
product of the draft LLM's probabilities. In a tree of M tokens it should have M · C_i of them, so
the branch pacer goes on with the branch that lacks most (equations 1 and 2):

    D = argmax_i (M · C_i - T_i).

Drafting ends once the largest confidence of all branches, T_c = max_i C_i, is below α. What the
target then accepts moves α (equation 3): all N_all tokens of the branch, α ← α / 2; N_correct of
them, α ← α / T_c^((N_all - N_correct) / N_all). While the target is read, the draft LLM goes on
after the branch that it likes best (provisional generation).

``as_in("edgellm", draft_model=small)``, with a target of `selfspec.load`, which reads
layers ahead of the forward.
Provisional generation is left out: it was right in too few steps to pay. `docs/papers.md` says what
else differs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eval.papers.diaa import FINE, recorded
from selfspec.config import SpecConfig
from selfspec.cost import Budget, Step, StepTime
from selfspec.draft.calibration import FixedPrior
from selfspec.draft.shape import Shape
from selfspec.draft.sources import RowStart
from selfspec.draft.tree import TreeGrower
from selfspec.errors import ConfigError
from selfspec.forward.model import vocab_size
from selfspec.neural.draft_cursor import DraftCursor
from selfspec.neural.small_model import DraftModel
from selfspec.records import DRAFT_MODEL, Candidate, DraftTree, Evidence, Pays, StepRecord

if TYPE_CHECKING:
    import torch

_LEAST, _MOST = 1e-6, 0.99  # of α, which goes on from one answer to the next


class Pacer(Shape):
    """A shape: equations 1 and 2 say whose turn it is. Each candidate is a branch."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes

    def grow(self, grower: TreeGrower) -> None:
        grower.best_first(priority=self.lack)

    def lack(self, score: float, depth: int) -> float:
        """How far a branch of confidence `score` is from its M · C tokens."""
        return self._max_nodes * score - (depth - 1)


class Fallback(Budget):
    """A budget: drafting ends once T_c is below α, which a right branch moves by `factor`."""

    def __init__(self, alpha: float = 0.01, factor: float = 0.5) -> None:
        self.alpha, self.factor = alpha, factor

    def step(self, allowed: int) -> Step:
        return _FallbackStep(allowed, self)

    def observe(self, num_all: int, num_correct: int, confidence: float) -> None:
        """Equation 3."""
        if num_all < 1:
            return
        wrong = (num_all - num_correct) / num_all
        self.alpha *= max(confidence, _LEAST) ** -wrong if wrong else self.factor
        self.alpha = min(max(self.alpha, _LEAST), _MOST)


class _FallbackStep(Step):
    """Drafts one token at least: only what was drafted moves α."""

    def __init__(self, max_nodes: int, budget: Fallback) -> None:
        super().__init__(max_nodes)
        self._budget = budget

    def search(self) -> Pays:
        alpha = self._budget.alpha
        return lambda tree, _score: len(tree) == 1 or confidence(tree) >= alpha

    def observe(self, took: StepTime, records: Sequence[StepRecord]) -> None:
        for record in records:
            if not record.path:  # The step had nothing but NaN.
                continue
            tree, leaf = record.tree, record.path[-1]
            while below := tree.children[leaf]:
                leaf = min(below.values())  # The child that was added first is the likeliest.
            self._budget.observe(tree.depths[leaf], len(record.path) - 1, confidence(tree))


def confidence(tree: DraftTree) -> float:
    """T_c, the largest confidence of a whole branch."""
    ends = (n for n in range(1, len(tree)) if not tree.children[n])
    return max((tree.scores[n] for n in ends), default=1.0)


class DraftLLM(DraftModel):
    """A source: the small model, which reads any node of a tree."""

    def open(self, row: RowStart) -> DraftCursor:
        return DraftLLMCursor(self.text(row), row, self._top_k, self._worth)


class DraftLLMCursor(DraftCursor):
    """The draft LLM's own probabilities, in place of its margins."""

    evidence_against = None

    def named(self, logits: torch.Tensor, depth: int) -> list[Candidate]:
        top = logits.float().softmax(-1).topk(self._top_k)
        likely = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            (token, Evidence(DRAFT_MODEL, rank=rank, probability_bin=round(p * FINE)))
            for rank, (token, p) in enumerate(likely, start=1)
        ]


def method(*, draft_model: Any = None, max_nodes: int = 33, **options: Any) -> dict[str, Any]:
    if draft_model is None:
        raise ConfigError(
            "as_in('edgellm') needs a small model with the same tokenizer (got none); pass "
            "draft_model=AutoModelForCausalLM.from_pretrained(...)"
        )
    return {
        "sources": (),
        "extra_sources": [DraftLLM(draft_model, num_ids=vocab_size(draft_model), top_k=8)],
        "shape": Pacer(SpecConfig.of(max_nodes=max_nodes).max_nodes - 1),
        "budget": Fallback(),
        "calibration": FixedPrior(recorded),  # The draft LLM's own probabilities.
        "max_nodes": max_nodes,
        **options,
    }
