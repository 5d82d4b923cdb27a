"""What `awaiting` changes in the processes of a server."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

LIMIT_S = 30.0
"""Maximum wait, in seconds, for a draft of sidecars that draft nothing meanwhile.

After it the target waits no more in this session of the link, for example for a sidecar that lies.
"""
FIRST_PASSES = 4
"""Passes of a request that wait for step drafts, if the request also gets drafts of other sources.
A drafter may be much slower than the target, and more waits would show nothing else."""
OF_STEPS = {"step", "head"}
OF_SIDECARS = OF_STEPS | {"queue"}
"""Sources of the drafts that sidecars make."""
POLL_S = 0.02
"""Seconds between two looks at a sidecar that drafts, or at a test that holds the target."""
HOLD = "QSPEC_TEST_HOLD"
"""Environment variable with the path of a file. While the file exists, the target runs only the
number of passes that the file has as text."""


def done_file(allowed: Path, scheduler: int = 0) -> Path:
    """Where a held target writes the number of passes that it has run, beside the file of HOLD.

    `scheduler` is the data-parallel rank.
    """
    return allowed.with_suffix(f".done{scheduler}")


class Hold:
    """Whether a test holds the target of this process."""

    def __init__(self, allowed: Path, scheduler: int = 0) -> None:
        self._allowed = allowed
        self._done = done_file(allowed, scheduler)
        self._before: int | None = None
        """Number of passes before the test held the target; None while it does not."""

    def holds(self, passes: int) -> bool:
        """Whether a target that has run this number of passes may run no other."""
        try:
            allowed = int(self._allowed.read_text())
        except FileNotFoundError:
            if self._before is not None:
                self._before = None
                self._done.unlink()
            return False
        if self._before is None:
            self._before = passes
        self._done.write_text(str(passes - self._before))
        return passes - self._before >= allowed


def install() -> None:
    """Change the classes of this process."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_parallel

    from sglang_qspec.engine.passes.decide.proposer import Proposer
    from sglang_qspec.engine.sidecar.client import SidecarClient
    from sglang_qspec.engine.sidecar.pool import SidecarPool
    from sglang_qspec.engine.speculator import Speculator
    from sglang_qspec.policy import DraftTrials, DraftUse, PassTimes, Sources

    @cache
    def hold() -> Hold:
        allowed = Path(os.environ.get(HOLD, os.devnull + ".none"))
        return Hold(allowed, get_parallel().dp_rank or 0)

    missed: set[int] = set()
    """Sessions of the link in which a draft did not come."""

    def holds(scheduler: Any) -> bool:
        first = scheduler.tp_group.rank_in_group == 0
        held: bool = scheduler.tp_group.broadcast_object(
            first and hold().holds(scheduler.forward_ct)
        )
        return held

    def ingest(sound: Callable[..., Any], self: Any, *given: Any) -> Any:
        result = sound(self, *given)
        while holds(self):
            time.sleep(POLL_S)
            sound(self, *given)
        return result

    def wait(sound: Callable[..., Any], self: Any, rids: Any, trees: Any, *given: Any) -> Any:
        active, session, began = self._drafts, self._session_count, time.monotonic()
        patience = Patience(active.sidecar)
        if session in missed:
            return (yield from sound(self, rids, trees, *given))
        waits = [waits_for_steps(active.live(rid)) for rid in rids]
        while active.awaited(rids, trees)[waits].any():
            came = yield POLL_S
            if came:
                return time.monotonic() - began, math.inf
            if patience.is_over:
                missed.add(session)
                break
        return time.monotonic() - began, 0.0

    def awaits(sound: Callable[..., Any], self: Any, live: Any) -> Any:
        if (submission := live.drafting.submission) is not None:
            submission.has_steps |= submission.reported == len(live.output_ids)
        return sound(self, live)

    def admit(sound: Callable[..., Any], self: Any, rid: str) -> Any:
        live, session = self.live(rid), self.sidecar.session_count
        patience = Patience(self.sidecar)
        steps = self.runtime_settings.mode != "queue" and live and live.controls.sources & OF_STEPS
        if live is not None and live.waits and not steps and session not in missed:
            while self.sidecar.ready and lacks_completion(live):
                time.sleep(POLL_S)
                self.poll()
                if patience.is_over:
                    missed.add(session)
                    break
        return sound(self, rid)

    def observe_pass(
        sound: Callable[..., Any], self: Any, requests: int, width: float, seconds: float
    ) -> Any:
        return sound(self, requests, width, self.seconds(requests, width))

    def observe_source(
        sound: Callable[..., Any], self: Any, source: Any, tokens: int, *given: Any, **costs: Any
    ) -> Any:
        # Waits and the link are recorded without tokens.
        return sound(self, source, tokens, *given, **costs) if tokens else None

    changes: tuple[tuple[type, str, Callable[..., Any]], ...] = (
        (Scheduler, "ingest_requests", ingest),
        (Proposer, "_wait", wait),
        (SidecarClient, "awaits", awaits),
        (Speculator, "admit", admit),
        (PassTimes, "observe", observe_pass),
        (Sources, "observe", observe_source),
        (DraftTrials, "choose", lambda *_, **__: DraftUse.ALL),
        (SidecarPool, "starve", lambda *_: None),
    )
    for owner, name, function in changes:
        wrap(owner, name, function)


class Patience:
    """A wait for drafts of the sidecars of a server, however slow they are."""

    def __init__(self, sidecars: Any) -> None:
        self._sidecars = sidecars
        self._drafted = self._tokens
        self._since = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the sidecars have drafted nothing for LIMIT_S."""
        if self._tokens != self._drafted:
            self._drafted, self._since = self._tokens, time.monotonic()
        return time.monotonic() - self._since > LIMIT_S

    @property
    def _tokens(self) -> list[int]:
        """Tokens that each sidecar has drafted, by its latest heartbeat."""
        beats = [client.link.heartbeat for client in self._sidecars._clients]
        return [0 if beat is None else beat.drafted_tokens for beat in beats]


def lacks_completion(live: Any) -> bool:
    """Whether the sidecar still drafts the first completion of a request."""
    submission = live.drafting.submission
    return submission is not None and 0 in submission.unfinished


def waits_for_steps(live: Any) -> bool:
    """Whether the next pass of a request waits for its step drafts."""
    if live is None:
        return False
    return live.controls.sources <= OF_SIDECARS or live.tally.passes < FIRST_PASSES


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of a class, or a function of a module.

    `function` gets the replaced one as its first argument.
    """
    sound = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: function(sound, *given, **named))
