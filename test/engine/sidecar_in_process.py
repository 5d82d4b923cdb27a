"""A speculator and the real drafter, connected by a real socket and stepped by the test."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import LinkServer, PrivateEndpoint, SidecarLink
from sglang_qspec.messages import PROTOCOL, Heartbeat, Hello, Welcome
from sglang_qspec.sidecar.drafter import Drafter
from sglang_qspec.trie import TrieLimits, TrieStore
from test.engine.speculating import finish_pass
from test.link.wire import FINGERPRINT, until
from test.sidecar.scripted import ScriptedModel

VOCAB = 1000


class Pair:
    """A server's speculator, and a sidecar with drafts that count up from the last token."""

    def __init__(self, endpoint: str, max_text_tokens: int = 1 << 20) -> None:
        self.model = ScriptedModel(vocab_size=VOCAB, context_len=256)
        self.drafter = Drafter(self.model, max_server_tokens=2 * max_text_tokens)
        welcome = Welcome(PROTOCOL, "scripted", VOCAB, 256, max_text_tokens=max_text_tokens)
        self.server = LinkServer(
            endpoint, welcome, FINGERPRINT, lambda: Heartbeat(self.drafter.requests, 0, 0, 0)
        )
        self.link = SidecarLink(endpoint, Hello(PROTOCOL, VOCAB, FINGERPRINT))
        config = QSpecConfig(max_request_tokens=1024, max_total_tokens=1 << 20)
        limits = TrieLimits(VOCAB, max_request_tokens=1024, max_total_tokens=1 << 20)
        self.active = Speculator(config, VOCAB, TrieStore(limits), Opened((self.link,)))
        self.outputs: dict[str, list[int]] = {}
        until(lambda: self.active.describe()["sidecar"] == "ready", self.poll)

    def poll(self) -> None:
        """One poll of each side."""
        self.active.poll()
        for peer, message in self.server.receive(0):
            self.drafter.handle(peer, message)
        for peer in self.server.departed():
            self.drafter.drop(peer)
        if not self.drafter.idle:
            self.drafter.step()
        for peer, answer in self.drafter.take():
            self.server.send(peer, answer)

    def run(self, rounds: int = 60) -> None:
        """Poll until nothing has been drafted for `rounds` polls."""
        quiet = 0
        while quiet < rounds:
            before = self.drafter.statistics.drafted_tokens
            self.poll()
            quiet = quiet + 1 if self.drafter.statistics.drafted_tokens == before else 0
            time.sleep(0.0005)  # for the threads of both sockets

    def enqueue(self, rid: str, prompt_ids: Sequence[int], max_new_tokens: int = 200) -> None:
        self.outputs[rid] = []
        self.active.enqueue(
            rid,
            prompt_ids=list(prompt_ids),
            output_ids=[],
            max_new_tokens=max_new_tokens,
            stop_token_ids=[],
        )

    def begin(self, rid: str, first: int) -> None:
        """Prefill: the target's first token is `first`, which no draft contains."""
        self.active.admit(rid)
        self.outputs[rid] = [first]

    def serve(self, rids: Sequence[str], width: int = 8) -> list[int]:
        """One pass of a target that counts up. Returns the number of tokens for each request."""
        outputs = [self.outputs[rid] for rid in rids]
        trees = self.active.propose(rids, outputs, width)
        accepted, bonus_ids = [], []
        for row, output in enumerate(outputs):
            nodes, at, last = [], 0, output[-1]
            while True:
                children = [
                    node
                    for node in range(1, int(trees.sizes[row]))
                    if trees.parents[row, node] == at and trees.token_ids[row, node] == last + 1
                ]
                if not children:
                    break
                at, last = children[0], last + 1
                nodes.append(at)
            accepted.append(nodes)
            bonus_ids.append(last + 1)
        for output, bonus_id in zip(outputs, bonus_ids, strict=True):
            output += range(output[-1] + 1, bonus_id + 1)
        finish_pass(self.active, rids, trees, accepted, bonus_ids)
        return [len(nodes) + 1 for nodes in accepted]

    def close(self) -> None:
        self.link.close()
        self.server.close()


@contextmanager
def pair(max_text_tokens: int = 1 << 20) -> Iterator[Pair]:
    with PrivateEndpoint() as private:
        both = Pair(private.address, max_text_tokens)
        try:
            yield both
        finally:
            both.close()
