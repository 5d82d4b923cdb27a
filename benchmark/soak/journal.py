"""Writes the files of a soak, one of requests and events, one of samples, each line at once."""

from __future__ import annotations

import csv
import json
import threading
import time
from pathlib import Path
from typing import Any, Self

from benchmark.harness.output import say
from benchmark.soak.mix import Request
from benchmark.soak.verdict import Verdict

EVENTS_FILE = "events.jsonl"
SAMPLES_FILE = "samples.csv"
SHOWN_BODY = 2000
"""Maximum characters of a request that are printed; the file has the whole request."""
SHOWN_RID = 40
"""Number of last characters of a rid that are printed."""


class Journal:
    """Files of a folder, as a context manager; times are seconds since it was opened."""

    def __init__(self, folder: Path, columns: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._events = (folder / EVENTS_FILE).open("w", encoding="utf-8")
        self._samples = (folder / SAMPLES_FILE).open("w", encoding="utf-8", newline="")
        self._rows = csv.DictWriter(self._samples, columns)
        self._rows.writeheader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._events.close()
            self._samples.close()

    @property
    def now(self) -> float:
        """Seconds since the journal was opened."""
        return time.monotonic() - self._began

    def note(self, event: str, **fields: Any) -> None:
        """Write an event, such as a kill of the sidecar."""
        with self._lock:
            # An interrupted request may end after the soak.
            if not self._events.closed:
                entry = {"at": round(self.now, 3), "event": event, **fields}
                self._events.write(json.dumps(entry) + "\n")
                self._events.flush()

    def request(self, request: Request, verdict: Verdict, details: dict[str, Any]) -> None:
        """Write an ended request; for a violation write its body too, and print it."""
        fields = {
            "number": request.number,
            "template": request.template.number,
            "path": request.template.path,
            "fate": request.fate.value,
            "kinds": request.kinds,
            "kind": verdict.kind.value,
            **details,
        }
        if verdict.violated:
            names = ("after_s", "after_pieces", "body")
            fields |= {"reason": verdict.reason, **{name: getattr(request, name) for name in names}}
            shown = json.dumps({**request.body, "rid": (request.rid or "")[-SHOWN_RID:]})
            say(
                f"{verdict.kind.value} at {self.now:.1f} s: request {request.number} "
                f"({request.fate.value}) to {request.template.path}: "
                f"{verdict.reason}\n  {shown[:SHOWN_BODY]}"
            )
        self.note("request", **fields)

    def sample(self, row: dict[str, Any]) -> None:
        """Write a sample; a column that `row` lacks is empty."""
        with self._lock:
            if not self._samples.closed:
                self._rows.writerow(row)
                self._samples.flush()
