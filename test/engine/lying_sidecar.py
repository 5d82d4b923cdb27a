"""A slow sidecar that sends wrong messages: a real process on a real socket, without a model.

    python -m test.engine.lying_sidecar ENDPOINT VOCAB_SIZE FINGERPRINT SEED

Handshake and heartbeats are right, so the server stays connected. The sidecar answers every Submit
and Commits with drafts that are random, stale, ahead of the output, too long, out of the
vocabulary, late, with gaps, of other requests, or not messages at all. It ends on SIGTERM.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from sglang_qspec.config import MAX_COMPLETIONS
from sglang_qspec.link import LinkServer, Peer
from sglang_qspec.link.frame import encode
from sglang_qspec.messages import (
    PROTOCOL,
    Commit,
    Commits,
    Declined,
    Drafted,
    FromSidecar,
    Gap,
    Heartbeat,
    Submit,
    Welcome,
)
from test.link.sockets import GARBAGE, OVERSIZED

LONGEST_DELAY_S = 0.4
OVERSIZED_AFTER = 60
"""Number of messages after which it sends, once, a frame that breaks the connection."""


class Liar:
    """Invents drafts for each message, some of them for another submission."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._submissions = [0]
        self._steps = 0

    def submit(self, message: Submit) -> Iterator[bytes]:
        self._submissions = [*self._submissions[-20:], message.submission]
        yield from self._lies(message.submission, message.base_len, message.completions)

    def commit(self, message: Commit) -> Iterator[bytes]:
        base_len = message.base_len + len(message.token_ids)
        yield from self._lies(message.submission, base_len, 0)
        yield self._step(message.submission, base_len)
        if self._rng.random() < 0.02:
            # A flood of empty drafts.
            yield from 300 * [encode(Drafted(message.submission, MAX_COMPLETIONS, 0, 0, []))]

    def _step(self, submission: int, base_len: int) -> bytes:
        """A draft that the protocol allows, with random tokens."""
        self._steps += 1
        draft = Drafted(submission, MAX_COMPLETIONS + self._steps, base_len, 0, self._tokens(12))
        return encode(draft)

    def _lies(self, submission: int, base_len: int, completions: int) -> Iterator[bytes]:
        rng = self._rng
        other = rng.choice(self._submissions)
        tokens = self._tokens(8)
        lies: list[FromSidecar] = [
            Drafted(submission, rng.randrange(8), base_len, 0, tokens, True),
            Drafted(submission, rng.randrange(8), base_len // 2, 0, tokens),
            Drafted(submission, rng.randrange(8), base_len + 7, 0, tokens),
            Drafted(submission, rng.randrange(8), base_len, 5, tokens),
            Drafted(submission, rng.randrange(8), base_len, 0, []),
            Drafted(submission, MAX_COMPLETIONS, base_len, 0, tokens * 4000),
            Drafted(submission, completions + 1, base_len, 0, tokens),
            Drafted(submission, (1 << 31) - 1, base_len, 0, tokens),
            Drafted(submission, -1, base_len, 0, tokens),
            Drafted(submission, 0, -base_len - 1, 0, tokens),
            Drafted(submission, 0, base_len, 0, [*tokens, self._vocab_size]),
            Drafted(submission, 0, base_len, 0, [*tokens, -1]),
            Drafted(other, 0, base_len, 0, tokens),
            Drafted(submission + 1, 0, base_len, 0, tokens),
        ]
        lies += [Gap(submission, rng.choice([None, 0, base_len])), Declined(other, "a lie")]
        frames = [encode(lie, 1 << 20) for lie in rng.sample(lies, 4)]
        yield from (*frames, frames[0], rng.choice(GARBAGE), frames[1][:-2])

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size), k=count)


def serve(server: LinkServer, liar: Liar, rng: random.Random, stopping: threading.Event) -> None:
    under_way: list[tuple[float, Peer, bytes]] = []
    answered = 0
    while not stopping.is_set():
        for peer, message in server.receive(5):
            frames: list[bytes] = []
            if isinstance(message, Submit):
                frames = list(liar.submit(message))
            elif isinstance(message, Commits):
                frames = [frame for commit in message.requests for frame in liar.commit(commit)]
            delay = rng.choice([0.0, 0.0, rng.uniform(0.0, LONGEST_DELAY_S)])
            under_way += [(time.monotonic() + delay, peer, frame) for frame in frames]
            answered += 1
            if answered == OVERSIZED_AFTER:
                under_way.append((time.monotonic(), peer, OVERSIZED))
        rng.shuffle(under_way)
        for item in list(under_way):
            due, peer, frame = item
            if due <= time.monotonic():
                under_way.remove(item)
                _send(server, peer, frame)


def _send(server: LinkServer, peer: Peer, frame: bytes) -> None:
    """Send raw bytes; do nothing if the server has gone."""
    if frame is OVERSIZED and peer in server.peers:  # `send` would refuse it
        server._router.send_multipart([peer.routing_id, frame])
    else:
        server.send(peer, msgspec.Raw(frame))  # type: ignore[arg-type]


def main() -> None:
    endpoint, vocab_size, fingerprint, seed = sys.argv[1:]
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    welcome = Welcome(PROTOCOL, "liar", int(vocab_size), context_len=1 << 20)
    # It claims that a draft step takes eleven days.
    heartbeat = Heartbeat(7, 7, 7, 7, step_times=[(1.0, 1e6)])
    server = LinkServer(endpoint, welcome, fingerprint, lambda: heartbeat)
    try:
        serve(server, Liar(int(vocab_size), int(seed)), random.Random(seed), stopping)
    finally:
        server.close()


if __name__ == "__main__":
    main()
