"""Which tree suits a model and a machine: counted, searched for and chosen.

Knows ranks and chances; nothing of tokens, models or files.
"""

from selfspec.fitting.counts import AcceptanceCounts, Path
from selfspec.fitting.search import Fit, TreeSearch, best_fit, best_tree, fitted

__all__ = [
    "AcceptanceCounts",
    "Fit",
    "Path",
    "TreeSearch",
    "best_fit",
    "best_tree",
    "fitted",
]
