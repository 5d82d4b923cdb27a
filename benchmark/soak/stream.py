"""Runs clients that stream one request after another, and records when tokens arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmark.harness.server import Server, ServerError

TIMEOUT_S = 120.0


class Stream:
    """Keeps `clients` requests in flight, over all prompts in turn, from `start` to `stop`.

    `answers` holds the first output of each prompt; the streams of several servers may share it. An
    output that differs from the first one counts as changed.
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
        """(time by `time.monotonic`, number of tokens that arrived at this time)."""
        self.finished = 0
        """Number of complete answers."""
        self.lost = 0
        """Number of requests without a complete answer."""
        self.changed = 0
        """Number of complete answers that differ from the first answer to the same prompt."""
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
        """Send no more requests, and wait for the requests in flight."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                index = self._next % len(self._prompts)
                self._next += 1
            try:
                output_ids, is_whole = self._ask(self._prompts[index])
            except (ServerError, OSError, ValueError, KeyError):
                output_ids, is_whole = [], False
            with self._lock:
                if not is_whole:
                    self.lost += 1
                    continue
                self.finished += 1
                self.changed += self._answers.setdefault(index, output_ids) != output_ids

    def _ask(self, text: str) -> tuple[list[int], bool]:
        """The output, and whether it is complete. Records the time of every token."""
        known, output_ids, reason = 0, [], None
        body = {"text": text, "sampling_params": self._sampling, "stream": True}
        for answer in self._server.stream("/generate", body, TIMEOUT_S):
            meta = answer["meta_info"]
            self.events.append((time.monotonic(), meta["completion_tokens"] - known))
            known, output_ids = meta["completion_tokens"], answer["output_ids"]
            reason = (meta["finish_reason"] or {}).get("type")
        return output_ids, reason in ("stop", "length")
