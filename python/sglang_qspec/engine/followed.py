"""What the sidecar knows of the output of each request it drafts for, and is yet to be told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_qspec.engine.live import Live
from sglang_qspec.link import Link
from sglang_qspec.messages import Commit, Commits

MAX_REQUESTS = 256
MAX_TOKENS = 16384
"""Of one report, about: no request is added to one that has so many. A retracted request or one
that a full link has kept from the sidecar for long has many."""


NO_CREDIT = 0.3
"""A request of which so little is believed gets no step drafts but for a try now and then."""
TRY_AFTER = 32
"""Committed tokens between two tries."""


class Followed:
    """Reports what requests have committed, so that their step drafts follow.

    Best effort: a report that the link does not take is not repeated, but the next one says all
    that is not known.
    """

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        """Committed output that the sidecar knows of, in tokens, for each request it works on."""

    def begin(self, rid: str, output_len: int) -> None:
        """The sidecar works on the request from now on, and knows so much of its output."""
        self._told[rid] = output_len

    def end(self, rid: str) -> None:
        """The sidecar works on the request no longer."""
        self._told.pop(rid, None)

    def report(self, rids: Iterable[str], live: Mapping[str, Live], link: Link, lead: int) -> None:
        """Tell of all that these requests have committed; drafts are to run `lead` tokens ahead."""
        commits: list[Commit] = []
        tokens = 0
        for rid in rids:
            told, request = self._told.get(rid), live.get(rid)
            if told is None or request is None or len(request.output_ids) <= told:
                continue
            if request.credit.factor < NO_CREDIT and len(request.output_ids) - told < TRY_AFTER:
                continue
            useful = min(lead, request.longest_draft)
            if useful < 1 or "step" not in request.controls.sources:
                continue
            commits.append(request.commit_since(told, useful))
            tokens += len(request.output_ids) - told
            if len(commits) >= MAX_REQUESTS or tokens >= MAX_TOKENS:
                break
        if commits and link.send(Commits(commits)):
            for commit in commits:
                self._told[commit.rid] = commit.base_len + len(commit.token_ids)

    def knows(self, rid: str, output_len: int) -> bool:
        """Whether the sidecar that says it knows so much of the output knows all it was told."""
        return self._told.get(rid) == output_len

    def awaits(self, live: Live) -> bool:
        """Whether more of the request's step draft is about to come."""
        return (
            live.steps
            and not live.rests
            and self._told.get(live.rid) == len(live.output_ids)
            and live.longest_draft > 1
        )

    def __contains__(self, rid: str) -> bool:
        """Whether the sidecar works on the request."""
        return rid in self._told
