"""The simulated sidecar: extends drafts in steps, for one or several targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from sglang_qspec.config import SLOTS_ON_CPU, SLOTS_ON_GPU, QSpecConfig
from sglang_qspec.sidecar.batch_scheduler import (
    BESIDE_STEPS,
    READ_BESIDE_STEPS,
    READ_ON_CPU,
    READ_ON_GPU,
)
from sglang_qspec.sidecar.draft_queue import PROMPTS_AHEAD
from sglang_qspec.tools.measure.tables import Tables
from sglang_qspec.tools.plan.clock import Clock, Process, Signal, Wait
from sglang_qspec.tools.plan.requests import SimulatedRequest
from sglang_qspec.trie import Source


@dataclass
class TargetLink:
    """The requests of one target at the sidecar; for that target, a `decide.DraftingSidecar`."""

    sidecar: Sidecar
    arrived: Signal
    """Wakes the target when draft tokens of a served request arrive."""
    waiting: dict[SimulatedRequest, None] = field(default_factory=dict)
    """Waiting requests with an unfinished draft, in the order of arrival."""
    growing: dict[SimulatedRequest, int] = field(default_factory=dict)
    """Served requests with a draft shorter than its lookahead: the position of its end."""
    served: dict[SimulatedRequest, int] = field(default_factory=dict)
    """Lookahead of each served request, in tokens."""
    used: float = 0.0
    """Drafting time, in seconds."""
    lookahead: int = 0
    """Maximum lookahead of step drafts in the present round, in tokens."""
    source: Source = Source.STEP
    """Source of what the sidecar drafts while a request is served."""

    @property
    def ready(self) -> bool:
        """Whether the sidecar runs."""
        return self.sidecar.ready

    @property
    def session_count(self) -> int:
        """Number of starts of the sidecar so far."""
        return self.sidecar.sessions

    @property
    def step_times(self) -> Sequence[tuple[float, float]]:
        """(drafts, seconds) of draft steps."""
        return self.sidecar.step_times

    @property
    def beside_steps(self) -> bool:
        """Whether the next step is for waiting requests, while others have step drafts."""
        return not self.growing and any(self.served.values())

    def submit(self, request: SimulatedRequest) -> None:
        """Send a request that waits for the target."""

        def act() -> None:
            if not request.done:
                self.waiting[request] = None
                self.sidecar.wake()

        self.sidecar.send(act)

    def commit(self, request: SimulatedRequest) -> None:
        """Send the output so far. Without lookahead the draft of the queue goes on alone."""
        known, lookahead = request.done, self.lookahead

        def act() -> None:
            # Tokens that the draft has are in the draft model's KV.
            request.unread += max(0, known - max(request.end, request.known))
            request.known = known
            if request.finished is not None:
                return
            first = request not in self.served
            self.served[request] = lookahead
            if lookahead:
                self.waiting.pop(request, None)
                self.go_on(request)
            elif first and request in self.waiting:
                # Its draft goes on after those of waiting requests.
                del self.waiting[request]
                self.waiting[request] = None

        self.sidecar.send(act)

    def close(self, request: SimulatedRequest) -> None:
        """Forget a finished request."""
        for kept in (self.waiting, self.growing, self.served):
            kept.pop(request, None)

    def go_on(self, request: SimulatedRequest) -> None:
        """Extend the draft of a served request to its lookahead, or begin a new one."""
        if not request.follows:
            request.begin = request.end = request.known
            self.growing.pop(request, None)
        limit = min(request.known + self.served[request], request.size)
        if request.end < limit:
            self.growing[request] = limit
            self.sidecar.wake()

    def next_rows(self, most: int) -> list[SimulatedRequest]:
        """Drafts that the next step extends, at most `most` of waiting requests.

        Those of served requests come first.
        """
        return list(self.growing) or list(self.waiting)[:most]


class Sidecar:
    """Drafts until the simulation ends; `outages` are (begin, end) times at which it is down.

    A message takes `delay` seconds from one end of the link to the other.
    """

    def __init__(
        self,
        clock: Clock,
        tables: Tables,
        delay: float,
        outages: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._clock = clock
        self._tables = tables
        self._delay = delay
        self._outages = sorted(outages)
        self._links: list[TargetLink] = []
        self._work = Signal()
        self.busy = False
        """Whether a step runs."""
        self.busy_seconds = 0.0
        self.drafted = 0
        """Draft tokens that were sent."""
        self.sessions = 1
        """Number of starts so far."""
        self.step_times = [(row.rows, row.seconds) for row in tables.draft_steps]
        """(drafts, seconds) of draft steps."""

    @property
    def ready(self) -> bool:
        """Whether the sidecar runs."""
        now = self._clock.now
        return not any(begin <= now < end for begin, end in self._outages)

    def connect(self, arrived: Signal) -> TargetLink:
        """Serve another target. Draft tokens of its served requests fire `arrived`."""
        link = TargetLink(self, arrived)
        self._links.append(link)
        return link

    def send(self, act: Callable[[], None]) -> None:
        """Let a message from either end arrive, which runs `act`."""
        self._clock.call(self._delay, act)

    def wake(self) -> None:
        """Go on after new work has come."""
        self._work.fire()

    def run(self) -> Process:
        """Draft, one step after another."""
        for begin, end in [*self._outages, (float("inf"), 0.0)]:
            while self._clock.now < begin:
                links = self._chosen()
                rows, tokens = self._next_step(links)
                if not rows and not tokens:
                    left = begin - self._clock.now
                    yield Wait(self._work, left)
                    continue
                seconds = self._tables.step_seconds(max(1, len(rows)))
                seconds += self._tables.draft_prefill_token * tokens
                begins = [row.begin for _, row in rows]
                self.busy = True
                yield seconds
                self.busy = False
                self.busy_seconds += seconds
                for link in links:
                    link.used += seconds / len(links)
                if self._clock.now < begin:
                    self._finish(rows, begins)
            yield max(0.0, end - self._clock.now)
            self._restart()

    def _chosen(self) -> list[TargetLink]:
        """The links of the next step: on a CPU the one with the least time, as in `FairQueue`."""
        ready = [link for link in self._links if link.growing] or [
            link for link in self._links if link.waiting
        ]
        if self._tables.on_gpu or not ready:
            return ready
        return [min(ready, key=lambda link: link.used)]

    def _next_step(
        self, links: Sequence[TargetLink]
    ) -> tuple[list[tuple[TargetLink, SimulatedRequest]], int]:
        """The drafts that the next step extends, and the number of tokens that it reads.

        A step extends as many drafts as a sidecar with the default of `draft_slots`. A draft with
        more unread tokens than the step may read is not extended yet.
        """
        on_gpu = self._tables.on_gpu
        slots = SLOTS_ON_GPU if on_gpu else SLOTS_ON_CPU
        few = not on_gpu and any(link.beside_steps for link in links)
        prompts = BESIDE_STEPS if few else PROMPTS_AHEAD
        most = READ_BESIDE_STEPS if few else READ_ON_GPU if on_gpu else READ_ON_CPU
        extended, left = [], most
        for link, row in _in_turn(links, prompts):
            if row.unread > 1:
                read = min(row.unread - 1, left)
                row.unread -= read
                left -= read
            if row.unread <= 1:
                extended.append((link, row))
            if len(extended) == slots:
                break
        return extended, most - left

    def _finish(
        self, rows: Sequence[tuple[TargetLink, SimulatedRequest]], begins: Sequence[int]
    ) -> None:
        """Add a token to each draft that no commit has replaced, and send the tokens."""
        sent: list[tuple[TargetLink, SimulatedRequest, int, int]] = []
        for (link, row), begin in zip(rows, begins, strict=True):
            row.unread = 1  # the new token
            if row.begin != begin or row.finished is not None:
                continue
            row.end += 1
            sent.append((link, row, row.begin, row.end))
            if row.end >= link.growing.get(row, row.size):
                link.growing.pop(row, None)
            if row.end >= min(row.size, row.begin + QSpecConfig.max_completion_tokens):
                link.waiting.pop(row, None)
        self.drafted += len(sent)
        self.send(lambda: _deliver(sent))

    def _restart(self) -> None:
        """Begin anew after an outage, with the requests that the targets submit again."""
        self.sessions += 1
        for link in self._links:
            for row in (*link.waiting, *link.served):
                row.unread = row.arrival.prompt + row.known
                row.begin = row.end = row.known
            for row, lookahead in link.served.items():
                if lookahead:
                    link.go_on(row)


def _in_turn(
    links: Sequence[TargetLink], prompts: int
) -> Iterator[tuple[TargetLink, SimulatedRequest]]:
    """The next draft of each link in turn, at most `prompts` waiting ones of a link."""
    rows = [[(link, row) for row in link.next_rows(prompts)] for link in links]
    return (each for turn in zip_longest(*rows) for each in turn if each is not None)


def _deliver(sent: Sequence[tuple[TargetLink, SimulatedRequest, int, int]]) -> None:
    """Let draft tokens arrive at their targets, which wait for those of served requests alone."""
    for _, row, begin, end in sent:
        # The text may match a later place of the draft already.
        row.seen_begin, row.seen_end = max(row.seen_begin, begin), end
    for link in {id(link): link for link, row, *_ in sent if row in link.served}.values():
        link.arrived.fire()
