"""How many draft tokens the next pass verifies, for whom, and how long it waits for them."""

from sglang_qspec.budget.pass_times import PassCost, PassTimes
from sglang_qspec.budget.pilot import Pilot
from sglang_qspec.budget.waiting import Patience, Punctuality, expected_gain
from sglang_qspec.budget.width import LADDER, Choice, WidthPolicy

__all__ = [
    "LADDER",
    "Choice",
    "PassCost",
    "PassTimes",
    "Patience",
    "Pilot",
    "Punctuality",
    "WidthPolicy",
    "expected_gain",
]
