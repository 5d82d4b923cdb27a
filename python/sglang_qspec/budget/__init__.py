"""How many draft tokens the next pass verifies, and for whom."""

from sglang_qspec.budget.width import LADDER, PassCost, WidthPolicy

__all__ = ["LADDER", "PassCost", "WidthPolicy"]
