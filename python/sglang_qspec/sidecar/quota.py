"""Limits the submissions and tokens that the sidecar keeps for each server."""

from __future__ import annotations

from collections import Counter

from sglang_qspec.config import MAX_SERVER_TOKENS
from sglang_qspec.link import Peer
from sglang_qspec.messages import MAX_SUBMISSIONS, Declined, Submit


class Quota:
    """Counts open submissions, their text tokens and their draft tokens by server.

    A text counts for each of its submissions, even if they share it. The server can therefore count
    in the same way, and hold back requests that exceed the limit.
    """

    def __init__(self, context_len: int, max_server_tokens: int = MAX_SERVER_TOKENS) -> None:
        """Set the limits, in tokens.

        `context_len` is the maximum length of a text with one draft token. `max_server_tokens` is
        the maximum number of text tokens, and separately of draft tokens, for one server.
        """
        self._context_len = context_len
        self._max_server_tokens = max_server_tokens
        self._submissions: Counter[Peer] = Counter()
        self._text_tokens: Counter[Peer] = Counter()
        self._draft_tokens: Counter[Peer] = Counter()

    def objection(self, peer: Peer, submit: Submit) -> Declined | None:
        """Return the message that declines a submission over a limit; None if it is accepted."""
        size, number = len(submit.token_ids), submit.submission
        if not size:
            return Declined(number, "the text is empty")
        if not self.fits_context(size):
            reason = (
                f"the text has {size} tokens, but must have fewer than {self._context_len} to fit "
                "the draft model"
            )
            return Declined(number, reason)
        if self._submissions[peer] >= MAX_SUBMISSIONS:
            reason = f"this server already has {MAX_SUBMISSIONS} open submissions, the maximum"
            return Declined(number, reason, retry=True)
        if not self.has_room_for_text(peer, size):
            reason = (
                f"the sidecar keeps at most {self._max_server_tokens} text tokens for this server"
            )
            return Declined(number, reason, retry=True)
        return None

    def has_room_for_text(self, peer: Peer, count: int) -> bool:
        """Whether the sidecar may keep `count` more text tokens for the server."""
        return self._text_tokens[peer] + count <= self._max_server_tokens

    def fits_context(self, size: int) -> bool:
        """Whether the draft model can continue a text of `size` tokens."""
        return size < self._context_len

    def room_for_drafts(self, peer: Peer) -> int:
        """Number of further draft tokens that the sidecar may keep for the server."""
        return self._max_server_tokens - self._draft_tokens[peer]

    def open(self, peer: Peer, text_tokens: int) -> None:
        """Count a new submission with the tokens of its text."""
        self._submissions[peer] += 1
        self._text_tokens[peer] += text_tokens

    def close(self, peer: Peer, text_tokens: int) -> None:
        """Subtract a closed submission, with the tokens of its text and committed output."""
        self._submissions[peer] -= 1
        self._text_tokens[peer] -= text_tokens

    def add_text(self, peer: Peer, count: int) -> None:
        """Count `count` tokens that were committed to the output of a request."""
        self._text_tokens[peer] += count

    def add_drafts(self, peer: Peer, count: int) -> None:
        """Count `count` new draft tokens; a negative count removes draft tokens."""
        kept = self._draft_tokens[peer] + count
        if kept:
            self._draft_tokens[peer] = kept
        else:
            del self._draft_tokens[peer]

    def drop(self, peer: Peer) -> None:
        """Forget a disconnected server, after its submissions were closed."""
        for counts in (self._submissions, self._text_tokens):
            del counts[peer]

    def check_integrity(self) -> None:
        """Raise AssertionError if a count is negative."""
        for counts in (self._submissions, self._text_tokens, self._draft_tokens):
            assert min(counts.values(), default=0) >= 0, "a count is negative"
