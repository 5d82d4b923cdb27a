"""The sidecar's one loop: messages in, a model step, drafts out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from sglang_qspec.errors import DraftModelError
from sglang_qspec.link import Peer
from sglang_qspec.messages import Admit, Close, Commits, FromSidecar, Submit, ToSidecar
from sglang_qspec.sidecar.queue_drafter import QueueDrafter

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 500
"""How long an idle sidecar sleeps at most before it looks whether it should stop."""


class Wire(Protocol):
    """What the loop needs of `link.LinkServer`."""

    def receive(self, timeout_ms: int) -> list[tuple[Peer, ToSidecar]]: ...

    def departed(self) -> list[Peer]: ...

    def send(self, peer: Peer, message: FromSidecar) -> bool: ...


def serve(drafter: QueueDrafter, wire: Wire, stopping: Callable[[], bool]) -> None:
    """Draft until `stopping`. Waits for messages only when there is nothing to draft.

    A model pass that fails costs the completions that were being drafted, and nothing else.
    """
    while not stopping():
        for peer, message in wire.receive(IDLE_POLL_MS if drafter.idle else 0):
            match message:
                case Submit():
                    drafter.submit(peer, message)
                case Admit():
                    drafter.admit(peer, message)
                case Commits():
                    drafter.follow(peer, message)
                case Close():
                    drafter.close(peer, message)
        for peer in wire.departed():
            drafter.drop(peer)
        if not drafter.idle:
            try:
                drafter.step()
            except (DraftModelError, RuntimeError):  # torch's own errors are RuntimeErrors
                logger.exception("A pass of the draft model failed; its completions end here")
                drafter.abandon()
        for peer, drafted in drafter.take():
            wire.send(peer, drafted)
