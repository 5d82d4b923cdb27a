"""Tells when the sidecar rests, because its CPUs are in use by the targets of its servers."""

from __future__ import annotations

from sglang_qspec.link import Peer
from sglang_qspec.messages import Rest, ToSidecar


class Resting:
    """Which servers want no passes at the moment.

    The sidecar rests while all servers that have sent messages want none. A server that says
    nothing about it wants passes.
    """

    def __init__(self) -> None:
        self._resting: set[Peer] = set()
        self._awake: set[Peer] = set()

    @property
    def rests(self) -> bool:
        """Whether the sidecar runs no pass."""
        return bool(self._resting) and not self._awake

    def note(self, peer: Peer, message: ToSidecar) -> None:
        """Note a message of a server."""
        if isinstance(message, Rest):
            self.drop(peer)
            (self._resting if message.rests else self._awake).add(peer)
        elif peer not in self._resting:
            self._awake.add(peer)

    def drop(self, peer: Peer) -> None:
        """Forget a server that has gone."""
        self._resting.discard(peer)
        self._awake.discard(peer)
