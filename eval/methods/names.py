"""The names of the methods that tables and figures know by name."""

__all__ = ["FORWARD_ONLY", "OURS", "STOCK"]

STOCK = "stock"  # All others are compared with it.
FORWARD_ONLY = "forward-only"  # Selfspec's way to run a forward, without drafts.
OURS = "selfspec"
