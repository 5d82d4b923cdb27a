"""Owns the messages to servers that the link has not taken yet."""

from __future__ import annotations

import time
from collections.abc import Iterable

from sglang_qspec.link import Peer
from sglang_qspec.messages import FromSidecar
from sglang_qspec.sidecar.text import Share

RETRY_S = 0.1
"""Time, in seconds, after which messages that did not fit a server's queue are sent again."""


class Outbox:
    """Pending messages with their receivers, and drafts to be sent again."""

    def __init__(self) -> None:
        self._messages: list[tuple[Peer, FromSidecar]] = []
        self._undelivered: dict[Share, None] = {}
        """Shares with a message that the link did not take; its tokens are sent again."""
        self._retry_at = 0.0

    def add(self, peer: Peer, message: FromSidecar) -> None:
        """Append a message to a server."""
        self._messages.append((peer, message))

    def extend(self, messages: Iterable[tuple[Peer, FromSidecar]]) -> None:
        """Append messages, each with its receiver."""
        self._messages += messages

    def take(self) -> list[tuple[Peer, FromSidecar]]:
        """Return pending messages with their receivers, each once."""
        if self._undelivered and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + RETRY_S
            undelivered, self._undelivered = self._undelivered, {}
            for share in undelivered:
                if share.completion.shares.get(share.subscriber) is share:
                    self.extend(share.news())
        messages, self._messages = self._messages, []
        return messages

    def repeat(self, share: Share, start: int) -> None:
        """Send the tokens of a share from position `start` on again, after `RETRY_S`."""
        share.sent = min(share.sent, start)
        share.finished_sent = False
        self._undelivered[share] = None
