"""What a sidecar keeps for each server, in tokens, and how much of it there may be."""

from __future__ import annotations

from collections import Counter

from sglang_qspec.config import MAX_SERVER_TOKENS
from sglang_qspec.link import Peer
from sglang_qspec.messages import MAX_SUBMISSIONS, Declined, Submit


class Quota:
    """Counts open submissions, their texts and the drafts for them, by server.

    Each submission counts with its whole text, also where it shares the text with others, so that a
    server can count alike and hold back what does not fit.
    """

    def __init__(self, context_len: int, max_server_tokens: int = MAX_SERVER_TOKENS) -> None:
        """`context_len`: tokens of a text and one draft token behind it, at most."""
        self._context_len = context_len
        self._max_server_tokens = max_server_tokens
        self._submissions: Counter[Peer] = Counter()
        self._text_tokens: Counter[Peer] = Counter()
        self._draft_tokens: Counter[Peer] = Counter()

    def objection(self, peer: Peer, submit: Submit) -> Declined | None:
        """Why nothing of a submission is kept, or None."""
        size, number = len(submit.token_ids), submit.submission
        if not size:
            return Declined(number, "the text is empty")
        if not self.fits_context(size):
            reason = f"the text has {size} tokens and leaves no room in {self._context_len}"
            return Declined(number, reason)
        if self._submissions[peer] >= MAX_SUBMISSIONS:
            reason = f"{MAX_SUBMISSIONS} submissions of this server are open"
            return Declined(number, reason, retry=True)
        if not self.has_room_for_text(peer, size):
            reason = f"{self._max_server_tokens} tokens of texts are kept for this server"
            return Declined(number, reason, retry=True)
        return None

    def has_room_for_text(self, peer: Peer, count: int) -> bool:
        """Whether so many tokens of texts more may be kept for the server."""
        return self._text_tokens[peer] + count <= self._max_server_tokens

    def fits_context(self, size: int) -> bool:
        """Whether a text of this size can be drafted on from."""
        return size < self._context_len

    def has_room_for_drafts(self, peer: Peer) -> bool:
        """Whether another draft token may be kept for the server."""
        return self._draft_tokens[peer] < self._max_server_tokens

    def open(self, peer: Peer, text_tokens: int) -> None:
        """A submission of a text is kept."""
        self._submissions[peer] += 1
        self._text_tokens[peer] += text_tokens

    def close(self, peer: Peer, text_tokens: int) -> None:
        """A submission is over, whose text and committed output have so many tokens."""
        self._submissions[peer] -= 1
        self._text_tokens[peer] -= text_tokens

    def add_text(self, peer: Peer, count: int) -> None:
        """The output of a request grew."""
        self._text_tokens[peer] += count

    def add_drafts(self, peer: Peer, count: int) -> None:
        """Draft tokens came, or went if `count` is negative."""
        self._draft_tokens[peer] += count
        if not self._draft_tokens[peer]:
            del self._draft_tokens[peer]

    def drop(self, peer: Peer) -> None:
        """A server has gone, and its submissions are closed."""
        for counts in (self._submissions, self._text_tokens):
            del counts[peer]

    def check_integrity(self) -> None:
        """Raise AssertionError if anything was taken back twice."""
        for counts in (self._submissions, self._text_tokens, self._draft_tokens):
            assert min(counts.values(), default=0) >= 0, "more was closed than there was"
