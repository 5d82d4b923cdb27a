"""How many draft tokens the next pass verifies, and for whom."""

from sglang_qspec.budget.waiting import Patience
from sglang_qspec.budget.width import LADDER, Choice, PassCost, WidthPolicy

__all__ = ["LADDER", "Choice", "PassCost", "Patience", "WidthPolicy"]
