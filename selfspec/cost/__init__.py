"""What a forward costs here, by its width, and how much drafting that pays for.

Knows widths, seconds and scores; not what runs, and nothing of tensors.
"""

from selfspec.cost.budget import Choice, WidthSearch, best_width
from selfspec.cost.curve import WIDTHS, CostCurve
from selfspec.cost.ledger import Ledger
from selfspec.cost.measuring import measure_curve
from selfspec.cost.policy import Budget, FixedBudget, MeasuredBudget, Step, Took

__all__ = [
    "WIDTHS",
    "Budget",
    "Choice",
    "CostCurve",
    "FixedBudget",
    "Ledger",
    "MeasuredBudget",
    "Step",
    "Took",
    "WidthSearch",
    "best_width",
    "measure_curve",
]
