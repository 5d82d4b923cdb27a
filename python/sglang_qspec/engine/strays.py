"""Requests that have left their drafts or outrun them, and what the sidecar knows of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sglang_qspec.engine.live import Live
from sglang_qspec.link import Link
from sglang_qspec.messages import Commit, Commits

INTERVAL_S = 0.02
"""Least time between two reports."""
MAX_REQUESTS = 64
MAX_TOKENS = 4096
"""Of one report, about: no request is added to one that has so many."""


class Strays:
    """Collects strays during passes and reports them together, so that they may be redrafted.

    Best effort: a report that the link does not take is not repeated, but a request that goes on
    without drafts strays again in its next pass, and the next report says all that is not known.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[str, int] = {}
        """Committed output that the sidecar knows of, in tokens, for each request it works on."""
        self._strayed: dict[str, None] = {}
        self._next_report = 0.0

    def begin(self, rid: str, output_len: int) -> None:
        """The sidecar works on the request from now on, and knows so much of its output."""
        self._told[rid] = output_len

    def end(self, rid: str) -> None:
        """The sidecar works on the request no longer."""
        self._told.pop(rid, None)
        self._strayed.pop(rid, None)

    def note(self, rid: str) -> None:
        """The request's latest pass accepted nothing that the sidecar drafted."""
        if rid in self._told:
            self._strayed[rid] = None

    def report(self, link: Link, live: Mapping[str, Live]) -> None:
        """Tell the sidecar of those noted since the last report, unless that was just now."""
        if not self._strayed or self._clock() < self._next_report:
            return
        self._next_report = self._clock() + INTERVAL_S
        commits: list[Commit] = []
        tokens = 0
        for rid in self._strayed:
            commit = live[rid].commit_since(self._told[rid])
            if commit.token_ids and commit.max_new_tokens > 0:
                commits.append(commit)
                tokens += len(commit.token_ids)
            if len(commits) >= MAX_REQUESTS or tokens >= MAX_TOKENS:
                break
        self._strayed.clear()
        if commits and link.send(Commits(commits)):
            for commit in commits:
                self._told[commit.rid] = commit.base_len + len(commit.token_ids)

    def __contains__(self, rid: str) -> bool:
        """Whether the sidecar works on the request."""
        return rid in self._told
