"""A decision on passes without drafts that stands for several of them.

While the requests of a batch stay the same and nothing can be drafted for them, each pass would be
decided like the last one. The measurements of these passes also wait until the next decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_qspec.engine.passes.lineup import Lineup
from sglang_qspec.engine.passes.proposal import Proposal
from sglang_qspec.engine.ranks import PassOrder
from sglang_qspec.policy.runtime_settings import RuntimeSettings

PASSES = 16
"""Maximum number of passes for which a decision stands."""
SECONDS = 0.1
"""Maximum time for which it stands, so that slow passes are decided one by one."""


@dataclass
class StandingPlan:
    """The decision on the early passes over one lineup."""

    lineup: Lineup
    settings: RuntimeSettings
    """A copy of the settings that it follows."""
    arrivals: int
    """`Speculator.arrivals` at the decision."""
    order: PassOrder
    pipeline: str
    proposal: Proposal | None
    """The roots; None after speculation has ended."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._left = PASSES
        self._until = self.clock() + SECONDS

    def holds(
        self, lineup: Lineup, settings: RuntimeSettings, arrivals: int, *, speculates: bool
    ) -> bool:
        """Whether it also decides the next pass, over `lineup`; counts that pass.

        `speculates` says whether speculation goes on.
        """
        self._left -= 1
        return (
            lineup is self.lineup
            and arrivals == self.arrivals
            and speculates is self.order.speculates
            and self._left > 0
            and self.clock() < self._until
            and settings == self.settings
        )
