"""A sidecar that drafts wrong tokens: a process that speaks the protocol, without a model.

    python -m benchmark.worst.wrong_sidecar ENDPOINT VOCAB_SIZE FINGERPRINT [CORE ...]

It draws every token at random, and keeps to the protocol otherwise. It sends completions at once.
It sends step drafts as fast as a good drafter, so that the target waits for them. SIGTERM ends it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmark.harness.dataset import tokenizer_of
from sglang_qspec import messages
from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import LinkServer, Peer, PrivateEndpoint, fingerprint
from sglang_qspec.messages import PROTOCOL, Close, Commit, Commits, Drafted, Heartbeat, Submit

STEP_SECONDS = 0.004
"""Seconds between two tokens of a step draft."""
LONGEST_COMPLETION = 64


class Guesser:
    """Drafts completions at once, and a step draft for each request from its latest commit."""

    def __init__(self, vocab_size: int) -> None:
        self.drafted = 0
        """Number of draft tokens."""
        self._rng = random.Random(0)
        self._vocab_size = vocab_size
        self._number = MAX_COMPLETIONS
        self._steps: dict[tuple[Peer, int], tuple[Commit, int, int]] = {}
        """The commit that a step draft continues, the draft's number, and its length."""

    def handle(self, peer: Peer, message: messages.ToSidecar) -> list[Drafted]:
        """The drafts that answer a message at once."""
        if isinstance(message, Submit):
            length = min(message.max_new_tokens, LONGEST_COMPLETION)
            numbers = range(message.completions)
            place = (message.base_len, 0, length)
            return [self._draft(message.submission, n, *place, True) for n in numbers]
        if isinstance(message, Commits):
            for request in message.requests:
                self._number += 1
                self._steps[peer, request.submission] = (request, self._number, 0)
        elif isinstance(message, Close):
            self._steps.pop((peer, message.submission), None)
        return []

    def step(self) -> list[tuple[Peer, Drafted]]:
        """One more token of each step draft, up to its maximum length."""
        drafts = []
        for (peer, submission), (commit, number, length) in list(self._steps.items()):
            finished = length + 1 >= commit.max_new_tokens
            base_len = commit.base_len + len(commit.token_ids)
            draft = self._draft(submission, number, base_len, length, 1, finished)
            drafts.append((peer, draft))
            self._steps[peer, submission] = (commit, number, length + 1)
            if finished:
                del self._steps[peer, submission]
        return drafts

    def _draft(
        self, submission: int, number: int, base_len: int, start: int, length: int, finished: bool
    ) -> Drafted:
        self.drafted += length
        token_ids = self._rng.choices(range(self._vocab_size), k=length)
        place = (submission, number, base_len, start)
        return Drafted(*place, token_ids, finished, known_len=base_len)


def serve(server: LinkServer, guesser: Guesser, stopping: threading.Event) -> None:
    """Answer until `stopping` is set."""
    due = time.monotonic()
    while not stopping.is_set():
        for peer, message in server.receive(1):
            for draft in guesser.handle(peer, message):
                server.send(peer, draft)
        if time.monotonic() >= due:
            due = time.monotonic() + STEP_SECONDS
            for peer, draft in guesser.step():
                server.send(peer, draft)


@contextmanager
def running(model: Path, vocab_size: int, cores: Sequence[int]) -> Iterator[str]:
    """Run the sidecar on `cores`, or unpinned if `cores` is empty; yields its endpoint."""
    digest = fingerprint(tokenizer_of(model).get_vocab())
    command = [sys.executable, "-m", "benchmark.worst.wrong_sidecar"]
    with PrivateEndpoint() as private:
        process = subprocess.Popen(
            [*command, private.address, str(vocab_size), digest, *map(str, cores)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
        )
        try:
            yield private.address
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    endpoint, vocab_size, digest, *cores = sys.argv[1:]
    if cores:
        os.sched_setaffinity(0, map(int, cores))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    welcome = messages.Welcome(PROTOCOL, "wrong", int(vocab_size), context_len=1 << 20)
    guesser = Guesser(int(vocab_size))

    def heartbeat() -> Heartbeat:
        times = [(1.0, STEP_SECONDS)]
        return Heartbeat(0, 0, guesser.drafted, 0, step_times=times)

    server = LinkServer(endpoint, welcome, digest, heartbeat)
    try:
        serve(server, guesser, stopping)
    finally:
        server.close()


if __name__ == "__main__":
    main()
