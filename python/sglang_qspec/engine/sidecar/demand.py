"""Which drafts a server asks its sidecars for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.requests.live_request import LiveRequest
from sglang_qspec.engine.requests.scopes import Scopes
from sglang_qspec.policy import Sources
from sglang_qspec.trie import Source


@dataclass
class Demand:
    """What a server asks all its sidecars for. The clients read it, and its owner changes it."""

    on_admission: str
    """The setting `on_admission`."""
    lookahead: int
    """Maximum lookahead of step drafts, in tokens; 0 for no step drafts."""
    vocab_size: int
    """The target's number of token ids."""
    clock: Callable[[], float] = time.monotonic
    may_step: bool = True
    """Whether rounds may have step drafts. A round without them has lookahead 0, but a later one
    may need that the sidecar knows the request."""
    paused: frozenset[Source] = frozenset()
    """Draft sources that no sidecar is asked for."""
    of_head: bool = False
    """Whether a head drafts for served requests, from their states."""
    has_model: bool = True
    """Whether a draft model drafts; a head alone makes no queue drafts."""
    stopped: bool = False
    """Whether no request is submitted."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of the submissions. All sidecars share them, so a number names one submission."""
    scopes: Scopes = field(default_factory=Scopes)
    """Numbers of the scopes of requests."""

    @classmethod
    def of(
        cls,
        settings: QSpecConfig,
        sources: Sources,
        vocab_size: int,
        clock: Callable[[], float],
        *,
        of_head: bool = False,
        has_model: bool = True,
    ) -> Demand:
        """The demand at the start of a server."""
        may_step = settings.mode != "queue"
        lookahead = settings.step_tokens if may_step else 0
        given = (settings.on_admission, lookahead, vocab_size, clock, may_step, sources.paused)
        return cls(*given, of_head=of_head, has_model=has_model)

    @property
    def source(self) -> Source:
        """Source of what the sidecars draft while a request is served."""
        return Source.HEAD if self.of_head else Source.STEP

    def asks(self, live: LiveRequest) -> bool:
        """Whether the request may use any of a sidecar's drafts."""
        if self.stopped or live.drafting.declined or live.controls.draft_token_num < 2:
            return False
        may_step = self.may_step and self.may(live, self.source)
        return may_step or self.may(live, Source.QUEUE)

    def asks_steps(self, live: LiveRequest) -> bool:
        """Whether the request may use step drafts in the present round."""
        return self.lookahead > 0 and self.may(live, self.source)

    def may(self, live: LiveRequest, source: Source) -> bool:
        """Whether the request may use drafts of this source."""
        if source is Source.QUEUE and not self.has_model:
            return False
        return source.name.lower() in live.controls.sources and source not in self.paused
