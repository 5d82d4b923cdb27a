"""A speculator with several fake sidecars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.sidecar.pool import Opened
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.errors import LinkError
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.trie import TrieLimits, TrieStore
from test.engine.speculating import PROMPT, VOCAB, counting, enqueue, poll


class Fleet:
    """A speculator with a fake sidecar at each endpoint; `bad` is an endpoint that fails."""

    def __init__(self, *endpoints: str, ready: bool = True, tick_s: float = 0.0) -> None:
        """The clock advances by `tick_s` at each look, so that no test depends on the machine."""
        self._now, self._tick_s = 0.0, tick_s
        self.links: dict[str, FakeSidecarLink] = {}
        """The latest link to each endpoint."""
        limits = TrieLimits(vocab_size=VOCAB, max_request_tokens=256, max_total_tokens=1 << 16)
        config = QSpecConfig(max_request_tokens=256, max_total_tokens=1 << 16)
        links = [self.connect(endpoint) for endpoint in endpoints]
        tries = TrieStore(limits)
        self.active = Speculator(
            config, VOCAB, tries, Opened(links, connect=self.connect), self.clock
        )
        for link in links:
            if not ready:
                link.die()
        poll(self.active)

    def clock(self) -> float:
        self._now += self._tick_s
        return self._now

    def connect(self, endpoint: str) -> FakeSidecarLink:
        if endpoint == "bad":
            raise LinkError("the endpoint is 'bad'")
        link = FakeSidecarLink(counting, vocab_size=VOCAB, endpoint=endpoint)
        self.links[endpoint] = link
        return link

    def enqueue(
        self, *rids: str, prompt_ids: Sequence[int] | None = None, scope: Hashable = None
    ) -> None:
        """Enqueue requests with these prompts; without `prompt_ids` every prompt is different."""
        for rid in rids:
            ids = [*PROMPT, *map(ord, rid)] if prompt_ids is None else list(prompt_ids)
            enqueue(self.active, rid, prompt_ids=ids, scope=scope)
        poll(self.active)

    def of(self, endpoint: str) -> set[str]:
        """The requests of a sidecar."""
        clients = self.active.sidecar._clients
        (client,) = (each for each in clients if each.link.endpoint == endpoint)
        return set(client.requests)

    def check(self) -> None:
        self.active.check_integrity()
        numbers = Counter(
            submit.submission for link in self.links.values() for submit in link.submits
        )
        assert not numbers or max(numbers.values()) == 1, "two submissions have one number"
