"""The main loop of the sidecar: receive messages, run a pass, send drafts."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sized
from typing import Protocol

from sglang_qspec.errors import DraftModelError, PromptError
from sglang_qspec.link import Faults, Peer
from sglang_qspec.messages import FromSidecar, ToSidecar
from sglang_qspec.sidecar.resting import Resting

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 500
"""Interval, in milliseconds, at which an idle sidecar checks whether it should stop."""
HANDLE_BUDGET_S = 0.02
"""Minimum of the maximum time, in seconds, for handling messages before the next pass. After a
longer pass it is the time of that pass: more messages have come meanwhile, and until they are
handled, the next pass drafts for texts that are no longer, and for requests that have ended."""
MAX_FAILURES = 5
"""Number of consecutive failed passes after which the process ends. A CUDA device that failed once
keeps failing until a new process initializes it."""


class Wire(Protocol):
    """The methods of `link.LinkServer` that the loop uses."""

    def receive(self, timeout_ms: int) -> list[tuple[Peer, ToSidecar]]: ...

    def departed(self) -> list[Peer]: ...

    def send(self, peer: Peer, message: FromSidecar) -> bool: ...


class Watch(Protocol):
    """What the loop uses of `Overload`."""

    def look(self) -> None: ...


class AnyDrafter(Protocol):
    """The methods of `Drafter`, `HeadDrafter` and `PairDrafter` that the loop uses."""

    @property
    def idle(self) -> bool: ...

    @property
    def overload(self) -> Watch: ...

    @property
    def retries(self) -> Sized: ...

    def handle(self, peer: Peer, message: ToSidecar) -> None: ...

    def expel(self, peer: Peer, message: ToSidecar) -> None: ...

    def drop(self, peer: Peer) -> None: ...

    def step(self, ends: Callable[[], bool]) -> None: ...

    def take(self) -> list[tuple[Peer, FromSidecar]]: ...

    def undelivered(self, peer: Peer, message: FromSidecar) -> None: ...


def serve(
    drafter: AnyDrafter,
    wire: Wire,
    stopping: Callable[[], bool],
    publish: Callable[[], None] | None = None,
) -> None:
    """Run the loop until `stopping()`; wait for messages only if there is nothing to draft.

    No pass runs while the servers let the sidecar rest. Each round calls `publish`, which publishes
    figures now and then.

    All exceptions of the sidecar are handled here. If a message raises, the sidecar declines the
    requests in it. If a pass raises, the sidecar declines the prompt that also fails alone.

    Raises DraftModelError after MAX_FAILURES consecutive failed passes. A prompt that fails alone
    does not count.
    """
    faults = Faults(logger, owner="sidecar")
    resting = Resting()
    failures = 0
    inbox: deque[tuple[Peer, ToSidecar]] = deque()
    budget = HANDLE_BUDGET_S

    def send() -> None:
        for peer, answer in drafter.take():
            if not wire.send(peer, answer):
                drafter.undelivered(peer, answer)

    def waits() -> bool:
        """Whether a message waits, for which a burst of passes ends. Sends what is ready."""
        send()
        inbox.extend(wire.receive(0))
        return bool(inbox)

    while not stopping():
        if not inbox:
            inbox += wire.receive(IDLE_POLL_MS if drafter.idle or resting.rests else 0)
        until = time.monotonic() + budget
        while inbox and time.monotonic() < until:
            peer, message = inbox.popleft()
            resting.note(peer, message)
            _handle(drafter, peer, message, faults)
        for peer in wire.departed():
            resting.drop(peer)
            inbox = deque(item for item in inbox if item[0] != peer)
            drafter.drop(peer)
        drafter.overload.look()
        if publish is not None:
            publish()
        if not (drafter.idle or resting.rests):
            alone = len(drafter.retries) > 0  # its success does not show that other passes work
            began = time.monotonic()
            try:
                drafter.step(waits)
                failures = failures if alone else 0
            except PromptError as error:
                faults.note("a prompt was declined", error, traceback=True)
                failures = 0
            except Exception as error:
                failures += 1
                faults.note("a pass of the draft model failed", error, traceback=True)
                if failures >= MAX_FAILURES:
                    raise DraftModelError(
                        f"{failures} passes of the draft model failed in a row; the last error is "
                        f"{type(error).__name__}: {error}"
                    ) from error
            budget = max(HANDLE_BUDGET_S, time.monotonic() - began)
        send()


def _handle(drafter: AnyDrafter, peer: Peer, message: ToSidecar, faults: Faults) -> None:
    try:
        drafter.handle(peer, message)
    except Exception as error:
        faults.note("could not handle a message", error, traceback=True)
        drafter.expel(peer, message)
