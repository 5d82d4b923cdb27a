"""The traffic of a soak: keeps requests in flight, and judges each ended request."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmark.harness.server import Server, ServerError
from benchmark.soak.answers import Answer
from benchmark.soak.asking import Response, ask
from benchmark.soak.journal import Journal
from benchmark.soak.mix import Fate, Mix, Request
from benchmark.soak.verdict import Kind, Verdict, judge

LEVEL_S = (5.0, 30.0)
"""Seconds for which the number of requests in flight stays the same."""
BURST_S = (30.0, 120.0)
"""Seconds between two bursts."""
BURST_SIZE = 2
"""Maximum size of a burst, as a multiple of the maximum of requests in flight."""
ENOUGH_VIOLATIONS = 100
"""The soak ends early after this number of failed or changed requests."""
AFTER_VIOLATION_S = 0.5
"""Pause after a violation, because a server may refuse everything."""


class Traffic:
    """Keeps `low` to `high` requests of `mix` in flight at `server`, and more in bursts."""

    def __init__(
        self,
        server: Server,
        mix: Mix,
        references: Mapping[int, Answer],
        in_flight: tuple[int, int],
        journal: Journal,
    ) -> None:
        self.ended: Counter[str] = Counter()
        """Number of ended requests by Kind."""
        self.compared = 0
        """Number of complete answers that were compared with a reference."""
        self.cuts: Counter[str] = Counter()
        """Number of requests that were cut on purpose, by fate and progress."""
        self._server = server
        self._mix = mix
        self._references = references
        self._low, self._high = in_flight
        self._journal = journal
        self._rng = random.Random(mix.seed + 1)
        self._changed = threading.Condition()
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def violations(self) -> int:
        return self.ended[Kind.FAILED.value] + self.ended[Kind.CHANGED.value]

    def run(self, until: float) -> None:
        """Send requests until the moment `until` of `time.monotonic`, or ENOUGH_VIOLATIONS."""
        rng = self._rng
        level, level_ends = self._high, 0.0
        burst_at = time.monotonic() + rng.uniform(*BURST_S) / 3
        while (now := time.monotonic()) < until and self._goes_on():
            if now >= level_ends:
                level = rng.randint(self._low, self._high)
                level_ends = now + rng.uniform(*LEVEL_S)
            # On a slow machine the server may still work on the previous burst.
            if now >= burst_at and self._in_flight <= self._high:
                size = rng.randint(self._high, BURST_SIZE * self._high)
                self._journal.note("burst", size=size)
                for _ in range(size):
                    self._start(self._mix.next())
                burst_at = now + rng.uniform(*BURST_S)
            while self._in_flight < level:
                self._start(self._mix.next())
            with self._changed:
                self._changed.wait(0.2)

    def finish(self, seconds: float) -> bool:
        """Wait until all requests have ended; returns False after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._in_flight and (left := deadline - time.monotonic()) > 0:
                if self._server.exit_code() is not None:
                    return False
                self._changed.wait(min(left, 1.0))
            return self._in_flight == 0

    def _goes_on(self) -> bool:
        return self.violations < ENOUGH_VIOLATIONS and self._server.exit_code() is None

    def _start(self, request: Request) -> None:
        with self._changed:
            self._in_flight += 1
        # A daemon, so an interrupt does not wait for it.
        threading.Thread(target=self._serve, args=[request], daemon=True).start()

    def _serve(self, request: Request) -> None:
        verdict = Verdict(Kind.FAILED, "the soak itself failed; its traceback was printed")
        details: dict[str, Any] = {}
        try:
            verdict, details = self._served(request)
        finally:
            if verdict.violated:
                time.sleep(AFTER_VIOLATION_S)
            with self._changed:
                self._in_flight -= 1
                self._mix.end(request)
                self.ended[verdict.kind.value] += 1
                self._journal.request(request, verdict, details)
                self._changed.notify_all()

    def _served(self, request: Request) -> tuple[Verdict, dict[str, Any]]:
        abort: threading.Timer | None = None
        if request.fate is Fate.ABORT and request.after_s is not None:
            abort = threading.Timer(request.after_s, self._abort, [request.rid])
            abort.daemon = True
            abort.start()
        response = ask(
            self._server,
            request.template.path,
            request.body,
            hang_up_s=request.after_s if request.fate is Fate.HANG_UP else None,
            pieces=request.after_pieces,
        )
        if abort is not None:
            abort.cancel()
        number = request.template.number
        reference = None if number is None else self._references[number]
        verdict = judge(request, response, reference)
        with self._changed:
            if verdict.kind is Kind.CUT:
                self.cuts[f"{request.fate.value}, {_reached(response)}"] += 1
            elif verdict.kind is Kind.WHOLE:
                self.compared += reference is not None
        return verdict, {
            "seconds": round(response.seconds, 3),
            "status": response.status,
            "hung_up": response.hung_up,
        }

    def _abort(self, rid: str) -> None:
        with contextlib.suppress(ServerError, OSError):
            self._server.post("/abort_request", {"rid": rid}, timeout=120.0)


def _reached(response: Response) -> str:
    """The progress of a cut request, as far as its client knows."""
    if "waiting queue" in str(response.error or response.data):
        return "waiting"
    if response.streamed:
        return "decoding" if response.data else "before the first token"
    return "unknown"
