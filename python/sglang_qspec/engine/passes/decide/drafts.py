"""What the decisions on a pass ask of the drafts: one interface, with two implementations.

`engine.speculator.Speculator` has the drafts of a server, `tools.plan.drafts.SimulatedDrafts` those
of a simulated target. test/engine/passes/test_drafts_contract.py runs over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.policy import FirstTokens, LastRequests, Sources
from sglang_qspec.policy.totals import Totals
from sglang_qspec.trie import DraftTrees, Source


class DraftingSidecar(Protocol):
    """The sidecars of a target, as one."""

    lookahead: int
    """Maximum lookahead of step drafts, in tokens; 0 for no step drafts."""

    @property
    def source(self) -> Source:
        """Source of what the sidecars draft while a request is served."""

    @property
    def ready(self) -> bool:
        """Whether a sidecar is connected."""

    @property
    def session_count(self) -> int:
        """Number of sessions so far; what was learnt of a sidecar holds for one session."""

    @property
    def step_times(self) -> Sequence[tuple[float, float]]:
        """(completions, seconds) of draft steps, in rising order; empty before any is known."""


class Drafts(Protocol):
    """The drafts of the running requests, and what is counted of them. `rids` name requests."""

    @property
    def totals(self) -> Totals:
        """Counts of draft tokens and passes."""

    @property
    def sources(self) -> Sources:
        """Pauses of draft sources."""

    @property
    def sidecar(self) -> DraftingSidecar:
        """Makes completions and step drafts."""

    @property
    def running(self) -> int:
        """Number of requests that are served now."""

    def propose(
        self,
        rids: Sequence[str],
        outputs: Sequence[Sequence[int]],
        width: int,
        *,
        drafts: bool = True,
    ) -> DraftTrees:
        """A tree of at most `width` tokens for each request; only the root without `drafts`.

        `outputs` has the committed output tokens of each request.
        """

    def factors(self, rids: Sequence[str]) -> NDArray[np.float64]:
        """Factor by which each request's scores are multiplied: float64 [bs]."""

    @property
    def last_requests(self) -> LastRequests:
        """What tokens are worth for the end of the batch."""

    def longest_pass(self, rids: Sequence[str]) -> float:
        """How many times as long a pass with drafts may take as one without.

        `math.inf` if there is no limit.
        """

    @property
    def others_wait(self) -> bool:
        """Whether requests wait to be served."""

    def passes_left(self) -> Mapping[str, float]:
        """Expected number of passes to come (`policy.passes_left`), by running request."""

    def tokens_left(self, rids: Sequence[str]) -> Sequence[int | None]:
        """Largest number of output tokens to come of each request; None if it is not known."""

    def awaited(self, rids: Sequence[str], trees: DraftTrees) -> NDArray[np.bool_]:
        """Whether the sidecar is about to send step-draft tokens for each request: bool [bs]."""

    def commit(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        bonus_ids: Sequence[int],
    ) -> None:
        """Commit the tokens of a pass over `trees`, and report them to the sidecar.

        `accepted` has the accepted nodes of each tree in order, `bonus_ids` the target's own token
        after them.
        """

    def count(
        self,
        rids: Sequence[str],
        trees: DraftTrees,
        accepted: Sequence[Sequence[int]],
        *,
        prefill: bool = False,
    ) -> None:
        """Count a pass over `trees`. A `prefill` does not count as a pass of a request."""

    def update_credit(self, rids: Sequence[str], offered: DraftTrees, first: FirstTokens) -> None:
        """Update the credit of each request by the first tokens of its `offered` tree."""

    def take_link_seconds(self) -> float:
        """Seconds spent on messages to and from the sidecar since the last call."""
