"""What the serving side sees of a sidecar, whichever way it is reached."""

from __future__ import annotations

import enum
from typing import Protocol

from sglang_qspec.messages import FromSidecar, Heartbeat, ToSidecar, Welcome

POLL_BUDGET_S = 0.002
"""Time after which a poll reads no further message. A frame of the largest size takes about 2 ms
to decode and check, so that a poll takes about 4 ms at most."""


class LinkState(enum.Enum):
    """Whether drafts can be asked for."""

    CONNECTING = "connecting"
    """No sidecar has answered yet."""
    READY = "ready"
    """A sidecar has answered, fits the target, and was heard of lately."""
    REFUSED = "refused"
    """The sidecar's model does not fit the target: see `Link.refusal`."""
    LOST = "lost"
    """The sidecar is gone or silent; the link keeps trying."""


class Delivery(enum.Enum):
    """What became of an attempt to send a message."""

    TAKEN = "taken"
    """The message is on its way."""
    LATER = "later"
    """The link is not ready or its queue is full; the message may be tried again."""
    NEVER = "never"
    """The message cannot be encoded or is longer than the sidecar reads: do not try it again."""

    def __bool__(self) -> bool:
        """Whether the message is on its way."""
        return self is Delivery.TAKEN


class Link(Protocol):
    """The server's end of the wire. One thread owns it; no method blocks or raises.

    When `session_count` changes, the sidecar knows nothing of earlier `Submit`s: the caller submits
    again what it still wants.
    """

    @property
    def state(self) -> LinkState: ...

    @property
    def session_count(self) -> int:
        """How many sessions a sidecar has opened for us; 0 before the first."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why the sidecar must not be used, while `state` is REFUSED."""
        ...

    @property
    def sidecar(self) -> Welcome | None:
        """What the sidecar last said about itself."""
        ...

    @property
    def heartbeat(self) -> Heartbeat | None:
        """What the sidecar last said about its load."""
        ...

    @property
    def dropped(self) -> int:
        """How often `send` answered LATER."""
        ...

    @property
    def malformed(self) -> int:
        """Messages in either direction that the protocol does not allow; they are dropped."""
        ...

    def send(self, message: ToSidecar) -> Delivery:
        """Hand a message over without waiting.

        The answer is LATER when the link is not READY or its queue is full. A `Close` is taken
        also while a connected sidecar is merely silent.
        """
        ...

    def receive(self, limit: int = 256) -> list[FromSidecar]:
        """Return messages that have come, oldest first; empty when none has.

        At most `limit` messages are returned, and fewer once a poll has taken `POLL_BUDGET_S`, so
        that a sidecar that sends much cannot hold up the scheduler. They are Drafted, Gap and
        Declined: the handshake and heartbeats are the link's own affair, and this call is what
        drives them, so call it in every iteration. Every token id of a draft lies in the
        vocabulary, and every length is at least zero; whether its submission is still open, and
        whether its base is the present one, is the caller's to check.
        """
        ...

    def close(self) -> None:
        """Drop what is queued and let go of the socket. May be called twice."""
        ...
