"""Samples the server and its sidecar each second: memory, files and state."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import state_of
from benchmark.soak.journal import Journal
from benchmark.soak.processes import FIGURES, ROLES, usage
from benchmark.soak.traffic import Traffic

INTERVAL_S = 1.0
USS_EVERY = 10
"""Samples from one measurement of private memory to the next; a measurement takes milliseconds."""
STATE = ("live_requests", "trie_tokens", "requests_in_flight", "drafting_requests", "drafting_rows")
"""Fields of /server_info that are 0 without requests."""
SIDECAR_STATE = ("sidecar_texts", "sidecar_kv_rows", "sidecar_kv_tokens")
"""Fields of the sidecar that are 0 without requests; they may be missing."""
COLUMNS = [
    "at",
    "in_flight",
    "sidecar_pid",
    *(f"{role}_{what}" for role in ROLES for what in FIGURES),
    "sidecar",
    "sidecar_restarts",
    *STATE,
    *SIDECAR_STATE,
]

Row = dict[str, Any]
"""A sample by the names of COLUMNS; it lacks unknown values."""


class Monitor:
    """Takes a sample each second until `over` is set; `rows` holds all samples."""

    def __init__(self, server: Server, traffic: Traffic, journal: Journal) -> None:
        self.rows: list[Row] = []
        self.unanswered = 0
        """Number of samples without a state, because /server_info did not answer in time."""
        self._server = server
        self._traffic = traffic
        self._journal = journal

    def run(self, over: threading.Event) -> None:
        following = time.monotonic()
        while not over.wait(max(0.0, following - time.monotonic())):
            # After a delay the monitor skips the missed samples.
            following = max(following + INTERVAL_S, time.monotonic())
            self.sample()

    def sample(self) -> None:
        """Take a sample now."""
        row: Row = {"at": round(self._journal.now, 3), "in_flight": self._traffic.in_flight}
        # A server need not have other processes.
        row |= {"other_rss_mib": 0.0, "other_uss_mib": 0.0}
        row |= usage(self._server, len(self.rows) % USS_EVERY == 0)
        try:
            state = state_of(self._server)
        except (ServerError, OSError):
            self.unanswered += 1
        else:
            names = ("sidecar", "sidecar_restarts", *STATE, *SIDECAR_STATE)
            row.update({name: state[name] for name in names if name in state})
        self.rows.append(row)
        self._journal.sample(row)


def series(
    rows: list[Row], names: tuple[str, ...], since: float = 0.0, pid: int | None = None
) -> list[tuple[float, float]]:
    """(seconds, sum of the columns) of the samples with all columns, from `since` seconds on.

    `pid` selects the samples of one sidecar process; None takes all.
    """
    found = []
    for row in rows:
        if row["at"] < since or (pid is not None and row.get("sidecar_pid") != pid):
            continue
        values = [row.get(name, math.nan) for name in names]
        if not any(math.isnan(value) for value in values):
            found.append((float(row["at"]), float(sum(values))))
    return found
