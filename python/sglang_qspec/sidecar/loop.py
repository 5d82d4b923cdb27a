"""The sidecar's one loop: messages in, a model step, drafts out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sglang_qspec.errors import DraftModelError, PromptError
from sglang_qspec.link import Faults, Peer
from sglang_qspec.messages import FromSidecar, ToSidecar
from sglang_qspec.sidecar.drafter import Drafter

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 500
"""How long an idle sidecar sleeps at most before it looks whether it should stop."""
HANDLE_BUDGET_S = 0.02
"""Time after which a pass is made before further messages are acted on."""
MAX_FAILURES = 5
"""Passes that fail in a row before the process ends. A device that has failed once fails for ever,
and only a new process gets a new one."""


class Wire(Protocol):
    """What the loop needs of `link.LinkServer`."""

    def receive(self, timeout_ms: int) -> list[tuple[Peer, ToSidecar]]: ...

    def departed(self) -> list[Peer]: ...

    def send(self, peer: Peer, message: FromSidecar) -> bool: ...


def serve(drafter: Drafter, wire: Wire, stopping: Callable[[], bool]) -> None:
    """Draft until `stopping`. Waits for messages only when there is nothing to draft.

    This is the place that decides what an exception means. One in a message costs the requests
    that the message is about. One in a pass costs the prompt that fails when it is tried alone.

    Raises DraftModelError after MAX_FAILURES passes that failed in a row, other than for a prompt
    that fails alone.
    """
    faults = Faults(logger, owner="sidecar")
    failures = 0
    inbox: deque[tuple[Peer, ToSidecar]] = deque()
    while not stopping():
        if not inbox:
            inbox += wire.receive(IDLE_POLL_MS if drafter.idle else 0)
        until = time.monotonic() + HANDLE_BUDGET_S
        while inbox and time.monotonic() < until:
            _handle(drafter, *inbox.popleft(), faults)
        for peer in wire.departed():
            inbox = deque(item for item in inbox if item[0] != peer)
            drafter.drop(peer)
        if not drafter.idle:
            alone = drafter.suspects > 0  # such a pass says nothing about others
            try:
                drafter.step()
                failures = failures if alone else 0
            except PromptError as error:
                faults.note("a prompt was declined", error, traceback=True)
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
            if not wire.send(peer, answer):
                drafter.undelivered(peer, answer)


def _handle(drafter: Drafter, peer: Peer, message: ToSidecar, faults: Faults) -> None:
    try:
        drafter.handle(peer, message)
    except Exception as error:
        faults.note("a message could not be acted on", error, traceback=True)
        drafter.expel(peer, message)
