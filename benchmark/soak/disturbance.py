"""Kills and stops the sidecar, and changes the server's settings, at random moments."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import sidecar_of
from benchmark.soak.journal import Journal

STOP_GAP_S = (8.0, 45.0)
SHORT_LIFE_S = (4.0, 40.0)
"""Seconds between two kills in quick succession; the sidecar may still load its model."""
LONG_LIFE = (0.15, 0.35)
"""Longer times between two kills, as shares of the soak; they suffice to measure memory."""
CHANGE_GAP_S = (5.0, 30.0)


@dataclass(frozen=True)
class Stroke:
    """A stop or a kill of the sidecar."""

    gap_s: float
    """Seconds between the previous stroke, or the start, and this one."""
    stopped_s: float
    """Seconds for which the sidecar stays stopped (SIGSTOP); 0 for no stop."""
    killed: bool
    """Whether the stroke ends with SIGKILL (True) or with SIGCONT (False)."""


def strokes(seed: int, seconds: float) -> Iterator[Stroke]:
    """An endless sequence of strokes for a soak of `seconds`."""
    rng = random.Random(seed)
    kill_in = seconds * rng.uniform(*LONG_LIFE)
    while True:
        gap, stopped = rng.uniform(*STOP_GAP_S), 10 ** rng.uniform(-1.0, 1.1)
        if gap < kill_in:
            yield Stroke(gap, stopped, False)
            kill_in -= gap + stopped
            continue
        stopped = stopped / 4 if rng.random() < 0.25 else 0.0
        yield Stroke(max(0.0, kill_in), stopped, True)
        short = rng.random() < 0.5
        kill_in = rng.uniform(*SHORT_LIFE_S) if short else seconds * rng.uniform(*LONG_LIFE)


class Strokes:
    """Stops and kills the sidecar until `over` is set."""

    def __init__(self, server: Server, seed: int, seconds: float, journal: Journal) -> None:
        self.counts: Counter[str] = Counter()
        self.kills: list[float] = []
        """Times of the kills, in seconds on the journal's clock."""
        self._server = server
        self._plan = strokes(seed, seconds)
        self._journal = journal

    def run(self, over: threading.Event) -> None:
        for stroke in self._plan:
            if over.wait(stroke.gap_s):
                return
            try:
                self._strike(stroke, over)
            except (psutil.Error, LookupError):
                # The server has not started the next sidecar yet.
                self.counts["missed"] += 1

    def _strike(self, stroke: Stroke, over: threading.Event) -> None:
        process = sidecar_of(self._server)
        if stroke.stopped_s:
            process.suspend()
            self.counts["stops"] += 1
            self._journal.note("stop", seconds=stroke.stopped_s)
            try:
                over.wait(stroke.stopped_s)
            finally:
                if not stroke.killed:
                    process.resume()
        if stroke.killed:
            process.kill()
            self.counts["kills"] += 1
            self.kills.append(self._journal.now)
            self._journal.note("kill", pid=process.pid)


class Changes:
    """Flushes the cache and changes settings until `over` is set; then it restores them."""

    def __init__(self, server: Server, seed: int, journal: Journal) -> None:
        self.counts: Counter[str] = Counter()
        self.failed = 0
        """Number of changes with a wrong HTTP status."""
        self._server = server
        self._rng = random.Random(seed)
        self._journal = journal

    def run(self, over: threading.Event) -> None:
        while not over.wait(self._rng.uniform(*CHANGE_GAP_S)):
            if self._rng.random() < 0.3:
                # The server refuses it while it has requests, which is no error.
                self._post("flush", "/flush_cache?timeout=1", {}, (200, 400))
                continue
            name, value, back, allowed = self._rng.choice(SETTINGS)
            self._set(name, value, allowed)
            if allowed and back is not None:
                over.wait(self._rng.uniform(0.5, 10.0))
                self._set(name, back, True)

    def _set(self, name: str, value: int, allowed: bool) -> None:
        body = {"server_args": {name: value}}
        self._post("setting", "/set_internal_state", body, (200,) if allowed else (400,))

    def _post(self, kind: str, path: str, body: dict[str, Any], wanted: tuple[int, ...]) -> None:
        began = time.monotonic()
        status: int | None = 200
        told = ""
        try:
            self._server.post(path, body, timeout=600.0)
        except (ServerError, OSError) as error:
            told = str(error)
            status = error.status if isinstance(error, ServerError) else None
        self.counts[kind] += 1
        wrong = status not in wanted and self._server.exit_code() is None
        self.failed += wrong
        seconds = round(time.monotonic() - began, 3)
        self._journal.note(
            kind, path=path, body=body, status=status, wrong=wrong, told=told[:300], seconds=seconds
        )


SETTINGS: tuple[tuple[str, int, int | None, bool], ...] = (
    ("qspec_enabled", 0, 1, True),
    *(("qspec_mode", mode, 4, True) for mode in range(4)),
    ("qspec_step_tokens", 4, 16, True),
    ("qspec_step_tokens", 64, 16, True),
    ("qspec_draft_token_num", 4, 16, True),
    ("qspec_fixed_width", 1, 0, True),
    ("qspec_completions", 2, 8, True),
    *((f"qspec_source_{source}", 0, 1, True) for source in ("prompt", "step", "queue")),
    ("qspec_mode", 9, None, False),
    ("qspec_completions", 1000, None, False),
    ("qspec_colour", 1, None, False),
)
"""A setting, a value, its default, and whether the server allows the value."""
