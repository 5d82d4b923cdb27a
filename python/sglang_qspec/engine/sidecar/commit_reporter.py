"""Reports committed output to the sidecar."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.sidecar.submissions import Submissions
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

    def __init__(self, link: Link, submissions: Submissions) -> None:
        self._link = link
        self._submissions = submissions
        self._left: int | None = None
        """Submission with which the next report begins, because the last report had no room for it;
        None if the last report had room for all."""

    def report(self, requests: Sequence[LiveRequest], lookahead: int) -> None:
        """Report new output of `requests`, and ask for up to `lookahead` draft tokens each.

        If a report has no room for a request, the next report begins with it.
        """
        commits: list[Commit] = []
        tokens = 0
        submissions = [live.drafting.submission for live in requests]
        numbers = [None if each is None else each.number for each in submissions]
        first = numbers.index(self._left) if self._left in numbers else 0
        self._left = None
        for live in (*requests[first:], *requests[:first]):
            commit = _commit_of(live, lookahead)
            if commit is None:
                continue
            if len(commits) >= MAX_COMMITS or tokens >= MAX_TOKENS:
                self._left = commit.submission
                break
            commits.append(commit)
            tokens += len(commit.token_ids)
        if commits and self._link.send(Commits(commits)):
            for commit in commits:
                self._submissions.note_reported(commit)


def _commit_of(live: LiveRequest, lookahead: int) -> Commit | None:
    """The unreported tokens of one request; None if there is nothing to report."""
    submission = live.drafting.submission
    if submission is None:
        return None
    unreported = len(live.output_ids) - submission.reported
    if unreported <= 0 or (live.credit.factor < NO_CREDIT and unreported < TRY_AFTER):
        return None
    useful = min(lookahead, live.longest_draft)
    if useful < 1:
        return None
    return live.commit_since(submission.number, submission.reported, useful)
