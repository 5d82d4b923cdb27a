"""The sidecar's one loop: messages in, a model step, drafts out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from sglang_qspec.errors import DraftModelError
from sglang_qspec.link import Faults, Peer
from sglang_qspec.messages import FromSidecar, ToSidecar
from sglang_qspec.sidecar.queue_drafter import QueueDrafter

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 500
"""How long an idle sidecar sleeps at most before it looks whether it should stop."""
MAX_FAILURES = 5
"""Passes that fail in a row before the process ends. A device that has failed once fails for ever,
and only a new process gets a new one."""


class Wire(Protocol):
    """What the loop needs of `link.LinkServer`."""

    def receive(self, timeout_ms: int) -> list[tuple[Peer, ToSidecar]]: ...

    def departed(self) -> list[Peer]: ...

    def send(self, peer: Peer, message: FromSidecar) -> bool: ...


def serve(drafter: QueueDrafter, wire: Wire, stopping: Callable[[], bool]) -> None:
    """Draft until `stopping`. Waits for messages only when there is nothing to draft.

    This is the place that decides what an exception means. One in a message costs the requests
    that the message is about. One in a pass costs the prompt that fails when it is tried alone.

    Raises DraftModelError after MAX_FAILURES passes that failed in a row.
    """
    faults = Faults(logger, owner="sidecar")
    failures = 0
    while not stopping():
        for peer, message in wire.receive(IDLE_POLL_MS if drafter.idle else 0):
            _handle(drafter, peer, message, faults)
        for peer in wire.departed():
            drafter.drop(peer)
        if not drafter.idle:
            try:
                drafter.step()
                failures = 0
            except Exception as error:
                failures += 1
                faults.note("a pass of the draft model failed", error, traceback=True)
                if failures >= MAX_FAILURES:
                    raise DraftModelError(
                        f"{failures} passes of the draft model failed in a row; the last one with "
                        f"{type(error).__name__}: {error}"
                    ) from error
        for peer, answer in drafter.take():
            wire.send(peer, answer)


def _handle(drafter: QueueDrafter, peer: Peer, message: ToSidecar, faults: Faults) -> None:
    try:
        drafter.handle(peer, message)
    except Exception as error:
        faults.note("a message could not be acted on", error, traceback=True)
        drafter.expel(peer, message)
