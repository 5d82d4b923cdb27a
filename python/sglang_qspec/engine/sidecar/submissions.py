"""The submissions of one sidecar: the open ones, and the ended ones that it still keeps."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_qspec.engine.requests.drafting import Submission
from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.messages import Commit, Submit


class Submissions:
    """Opens and ends the submissions of requests, and counts what the sidecar keeps for them."""

    def __init__(self) -> None:
        self.tokens = 0
        """Sum of `Submission.kept_tokens` over the open submissions."""
        self.unfinished = 0
        """Number of open submissions with unfinished completions."""
        self.unclosed: dict[int, None] = {}
        """Numbers of ended submissions; the link has not taken their Close yet."""
        self._open: dict[int, LiveRequest] = {}
        """The request of each open submission."""

    def __len__(self) -> int:
        """Number of open submissions."""
        return len(self._open)

    @property
    def kept(self) -> int:
        """Number of submissions that the sidecar keeps: the open and the unclosed ones."""
        return len(self._open) + len(self.unclosed)

    def request(self, number: int) -> LiveRequest | None:
        """The request of an open submission; None for a closed one."""
        return self._open.get(number)

    def open(self, live: LiveRequest, message: Submit) -> None:
        """Note that the link has taken the Submit of a request."""
        tokens = len(message.token_ids)
        live.drafting.submission = Submission(
            message.submission, tokens, message.base_len, set(range(message.completions))
        )
        self._open[message.submission] = live
        self.tokens += tokens
        self.unfinished += message.completions > 0

    def end(self, live: LiveRequest, *, close: bool) -> None:
        """End the open submission of a request, if it has one; `close` if the sidecar has it."""
        submission, live.drafting.submission = live.drafting.submission, None
        if submission is None:
            return
        del self._open[submission.number]
        self.tokens -= submission.kept_tokens
        self.unfinished -= bool(submission.unfinished)
        if close:
            self.unclosed[submission.number] = None

    def finish(self, submission: Submission, completion: int) -> None:
        """Note that the sidecar has finished a completion."""
        if submission.unfinished:
            submission.unfinished.discard(completion)
            self.unfinished -= not submission.unfinished

    def note_reported(self, commit: Commit) -> None:
        """Note the tokens that a report of an open submission had.

        A token that is reported twice counts twice, so the sidecar never keeps more than counted.
        """
        submission = self._open[commit.submission].drafting.submission
        assert submission is not None
        submission.reported = commit.base_len + len(commit.token_ids)
        submission.kept_tokens += len(commit.token_ids)
        self.tokens += len(commit.token_ids)

    def check_integrity(self, requests: Iterable[LiveRequest]) -> None:
        """Raise RuntimeError if an open submission belongs to none of these requests."""
        submitted = {
            live.drafting.submission.number: live
            for live in requests
            if live.drafting.submission is not None
        }
        if submitted.keys() != self._open.keys() or any(
            self._open[number] is not live for number, live in submitted.items()
        ):
            raise RuntimeError("the open submissions are not those of the live requests")
        found = [live.drafting.submission for live in submitted.values()]
        if self.unfinished != sum(bool(each.unfinished) for each in found if each):
            raise RuntimeError("the number of requests with unfinished completions is wrong")
        if self.tokens != sum(each.kept_tokens for each in found if each):
            raise RuntimeError("the token count of the open submissions is wrong")
