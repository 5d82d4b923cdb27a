"""Reports committed output to the sidecar, and tracks what the sidecar knows."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.link import Link
from sglang_qspec.messages import MAX_COMMITS, Commit, Commits

MAX_TOKENS = 8192
"""A report with at least this number of tokens takes no further request."""
NO_CREDIT = 0.3
"""Credit factor below which a request is reported only every TRY_AFTER tokens."""
TRY_AFTER = 32
"""Number of committed tokens between two reports of a request without credit."""


class CommitReporter:
    """Sends the `Commits` that step drafts continue from.

    Best effort: a report that the link does not take is not repeated. The next report has all
    unreported tokens, and a sidecar that lacks tokens answers with a `Gap`.
    """

    def __init__(self) -> None:
        self._reported: dict[int, int] = {}
        """Number of output tokens reported for each open submission."""
        self._left: int | None = None
        """Submission with which the next report begins, because the last report had no room for it;
        None if the last report had room for all."""

    def begin(self, submission: int, output_len: int) -> None:
        """Note an open submission; its Submit had `output_len` output tokens."""
        self._reported[submission] = output_len

    def end(self, submission: int) -> None:
        """Forget a closed submission."""
        self._reported.pop(submission, None)

    def rewind(self, submission: int, output_len: int) -> bool:
        """Report again from `output_len` on; False if no more than that was reported."""
        if not output_len < self._reported.get(submission, 0):
            return False
        self._reported[submission] = output_len
        return True

    def report(self, requests: Sequence[LiveRequest], link: Link, lookahead: int) -> list[Commit]:
        """Report new output of `requests`, and ask for up to `lookahead` draft tokens each.

        If a report has no room for a request, the next report begins with it. Returns the commits
        that the link has taken.
        """
        commits: list[Commit] = []
        tokens = 0
        numbers = [request.drafting.submission for request in requests]
        first = numbers.index(self._left) if self._left in numbers else 0
        self._left = None
        for request in (*requests[first:], *requests[:first]):
            commit = self._commit_of(request, lookahead)
            if commit is None:
                continue
            if len(commits) >= MAX_COMMITS or tokens >= MAX_TOKENS:
                self._left = commit.submission
                break
            commits.append(commit)
            tokens += len(commit.token_ids)
        if not commits or not link.send(Commits(commits)):
            return []
        for commit in commits:
            self._reported[commit.submission] = commit.base_len + len(commit.token_ids)
        return commits

    def _commit_of(self, request: LiveRequest, lookahead: int) -> Commit | None:
        """The unreported tokens of one request; None if there is nothing to report."""
        number = request.drafting.submission
        reported = self._reported.get(number) if number is not None else None
        if number is None or reported is None or len(request.output_ids) <= reported:
            return None
        if request.credit.factor < NO_CREDIT and len(request.output_ids) - reported < TRY_AFTER:
            return None
        useful = min(lookahead, request.longest_draft)
        if useful < 1 or "step" not in request.controls.sources:
            return None
        return request.commit_since(number, reported, useful)

    def knows(self, live: LiveRequest, output_len: int) -> bool:
        """Whether a sidecar that knows `output_len` output tokens has read all reports."""
        number = live.drafting.submission
        return number is not None and self._reported.get(number) == output_len

    def awaits(self, live: LiveRequest) -> bool:
        """Whether the sidecar is about to send more of the request's step draft."""
        return (
            live.drafting.has_steps
            and live.drafting.complete_at != len(live.output_ids)
            and self.knows(live, len(live.output_ids))
            and live.longest_draft > 1
        )
