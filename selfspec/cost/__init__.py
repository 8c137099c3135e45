"""What a forward costs here, by its width, and how much drafting that pays for.

Knows widths, seconds and scores; not what runs, and nothing of tensors.
"""

from selfspec.cost.budget import Budget, MeasuredBudget, Step, StepTime
from selfspec.cost.curve import WIDTHS, CostCurve
from selfspec.cost.ledger import Ledger
from selfspec.cost.width import WidthSearch, best_width

__all__ = [
    "WIDTHS",
    "Budget",
    "CostCurve",
    "Ledger",
    "MeasuredBudget",
    "Step",
    "StepTime",
    "WidthSearch",
    "best_width",
]
