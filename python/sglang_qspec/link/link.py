"""What the serving side sees of a sidecar, whichever way it is reached."""

from __future__ import annotations

import enum
from typing import Protocol

from sglang_qspec.messages import FromSidecar, Heartbeat, ToSidecar, Welcome


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


class Link(Protocol):
    """The server's end of the wire. One thread owns it; no method blocks or raises.

    Work that was submitted survives as long as `generation` does. When `generation` changes, the
    sidecar knows nothing of the earlier `Submit`s: submit again what is still wanted.
    """

    @property
    def state(self) -> LinkState: ...

    @property
    def generation(self) -> int:
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
        """How often `send` did not take a message."""
        ...

    @property
    def malformed(self) -> int:
        """Messages in either direction that the protocol does not allow; they are dropped."""
        ...

    def send(self, message: ToSidecar) -> bool:
        """Hand a message over without waiting; False when it was not taken and may be tried later.

        It is not taken when the link is not READY or its queue is full. A `Close` is taken also
        while a connected sidecar is merely silent. A message that can never be sent, because it
        cannot be encoded or is too long, counts as taken and as malformed: to try again would
        hold up those behind it.
        """
        ...

    def receive(self, limit: int = 256) -> list[FromSidecar]:
        """At most about `limit` messages that have come, oldest first; empty when none has.

        Only drafts: the handshake and heartbeats are the link's own affair, and this call is what
        drives them, so call it in every iteration. Every token id of a draft lies in the
        vocabulary, and every length is at least zero; whether its request still exists, and
        whether its base is the present one, is the caller's to check.
        """
        ...

    def close(self) -> None:
        """Drop what is queued and let go of the socket. May be called twice."""
        ...
