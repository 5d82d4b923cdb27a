"""Interface of a server to its sidecar."""

from __future__ import annotations

import enum
from typing import Protocol

from sglang_qspec.messages import FromSidecar, Heartbeat, ToSidecar, Welcome

POLL_BUDGET_S = 0.002
"""Time, in seconds, after which a poll reads no further message. To decode and check a frame of
maximum size takes about 2 ms, so a poll takes at most about 4 ms."""


class LinkState(enum.Enum):
    """State of the link; drafts are available while it is READY."""

    CONNECTING = "connecting"
    """No sidecar has answered yet."""
    READY = "ready"
    """A sidecar has answered, fits the target, and is not silent."""
    REFUSED = "refused"
    """The sidecar's model does not fit the target: see `Link.refusal`."""
    LOST = "lost"
    """The sidecar is gone or silent; the link keeps trying."""


class Delivery(enum.Enum):
    """Result of an attempt to send a message."""

    TAKEN = "taken"
    """The message is queued."""
    LATER = "later"
    """The link is not ready or its queue is full; the caller may send the message again."""
    NEVER = "never"
    """The message cannot be encoded or is too large for the sidecar; do not send it again."""

    def __bool__(self) -> bool:
        """Whether the message is queued."""
        return self is Delivery.TAKEN


class Link(Protocol):
    """The server's end of the connection. One thread owns it; no method blocks or raises.

    When `session_count` changes, the sidecar has none of the earlier submissions; the caller then
    submits its live requests again.
    """

    starved: bool
    """Set by the caller while the sidecar gets hardly any CPU time, so that silence is no sign."""

    @property
    def endpoint(self) -> str:
        """Address of the sidecar."""
        ...

    @property
    def state(self) -> LinkState: ...

    @property
    def session_count(self) -> int:
        """Number of sessions opened so far; 0 before the first."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why the sidecar does not fit, while `state` is REFUSED; otherwise None."""
        ...

    @property
    def sidecar(self) -> Welcome | None:
        """The sidecar's latest Welcome; None before the first."""
        ...

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The sidecar's latest Heartbeat; None before the first."""
        ...

    @property
    def dropped(self) -> int:
        """Number of sends that returned LATER."""
        ...

    @property
    def malformed(self) -> int:
        """Number of messages, in either direction, dropped because they violate the protocol."""
        ...

    def send(self, message: ToSidecar) -> Delivery:
        """Queue a message without waiting.

        Returns LATER if the link is not READY or its queue is full. A `Close` is also queued while
        a connected sidecar is silent.
        """
        ...

    def receive(self, limit: int = 256) -> list[FromSidecar]:
        """Return received Drafted, Gap and Declined messages, oldest first.

        Returns at most `limit` messages, and fewer after `POLL_BUDGET_S`, so that a busy sidecar
        cannot delay the scheduler. Call it in every iteration, because it also drives the handshake
        and the heartbeats. Token ids are within the vocabulary and lengths at least 0. The caller
        checks that a draft's submission is still open and that its `base_len` is current.
        """
        ...

    def close(self) -> None:
        """Drop queued messages and close the socket. May be called twice."""
        ...
