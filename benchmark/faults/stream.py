"""Clients that stream one request after another, and when each token of theirs came."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from benchmark.harness.server import Server

TIMEOUT_S = 120.0


class Stream:
    """`clients` requests at a time, over all prompts in turn, from `start` to `stop`.

    Output that differs from that of an earlier request with the same prompt counts as changed;
    `answers` may be shared by the streams of several servers.
    """

    def __init__(
        self,
        server: Server,
        prompts: Sequence[str],
        sampling: dict[str, Any],
        clients: int,
        answers: dict[int, list[int]],
    ) -> None:
        self.events: list[tuple[float, int]] = []
        """(when, how many tokens came), by `time.monotonic`."""
        self.finished = 0
        """Requests that ended with a whole answer."""
        self.lost = 0
        """Requests that ended otherwise."""
        self.changed = 0
        """Whole answers that are not what the same prompt got before."""
        self._server = server
        self._prompts = prompts
        self._sampling = sampling
        self._answers = answers
        self._next = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more requests; returns when those under way have ended."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                index = self._next % len(self._prompts)
                self._next += 1
            try:
                output_ids, reason = self._ask(self._prompts[index])
            except (OSError, ValueError, KeyError):
                reason = None
            with self._lock:
                if reason is None:
                    self.lost += 1
                    continue
                self.finished += 1
                self.changed += self._answers.setdefault(index, output_ids) != output_ids

    def _ask(self, text: str) -> tuple[list[int], str | None]:
        """Its output and why it ended; None if it did not. Notes every token as it comes."""
        known, output_ids, reason = 0, [], None
        for answer in self._chunks(text):
            meta = answer["meta_info"]
            self.events.append((time.monotonic(), meta["completion_tokens"] - known))
            known, output_ids = meta["completion_tokens"], answer["output_ids"]
            reason = (meta["finish_reason"] or {}).get("type")
        return output_ids, reason if reason in ("stop", "length") else None

    def _chunks(self, text: str) -> Iterator[dict[str, Any]]:
        body = {"text": text, "sampling_params": self._sampling, "stream": True}
        request = urllib.request.Request(
            self._server.url + "/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
