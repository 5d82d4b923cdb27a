"""Which batch gets the next line: fairly among tenants, and by deadlines where these are near.

Work is measured in output tokens, and the servers' speed in tokens per second. Serving by the
earliest deadline meets all deadlines that can be met; serving in turn by tenants is fair. A batch
is *pressed* once it and the batches due before it need most of the time that is left. While one is
pressed, the batch with the earliest deadline is served. Otherwise the tenant that was served least
comes next, with its earliest deadline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PRESSED = 0.7
"""Share of the time before a deadline that the work due until then may need, before deadlines alone
decide. The rest covers errors of the estimates."""
MEMORY_S = 120.0
"""Seconds of serving in which the measured speed, and what tenants were served, fade to 1/e."""
FEWEST_S = 10.0
"""Seconds of serving that are measured before the speed is known."""
LINE_TOKENS = 128.0
"""Output tokens of a line before any line was answered."""
PRIOR_LINES = 8
"""The usual length of answers counts as much as this number of the batch's own answers."""


@dataclass(frozen=True)
class Due:
    """A batch that has lines to ask."""

    tenant: str
    deadline: float
    """Time at which it must be done, in seconds of the clock of `now`."""
    tokens: float
    """Expected output tokens of the lines that are not answered."""


def choose(batches: Sequence[Due], served: dict[str, float], speed: float, now: float) -> int:
    """The index of the batch that gets the next line.

    `served` are output tokens by tenant, and `speed` is in tokens per second; 0 if it is not known.
    """
    by_deadline = sorted(range(len(batches)), key=lambda index: batches[index].deadline)
    if is_pressed([batches[index] for index in by_deadline], speed, now):
        return by_deadline[0]
    return min(by_deadline, key=lambda index: served.get(batches[index].tenant, 0.0))


def is_pressed(batches: Sequence[Due], speed: float, now: float) -> bool:
    """Whether a batch, in the order of deadlines, may be late unless deadlines alone decide."""
    return load(batches, speed, now) > PRESSED


def load(batches: Sequence[Due], speed: float, now: float) -> float:
    """The largest share of the time before a deadline that the work due until then needs.

    `batches` are in the order of deadlines. 0 if the speed is not known.
    """
    if not speed:
        return 0.0
    most = tokens = 0.0
    for batch in batches:
        tokens += batch.tokens
        left = batch.deadline - now
        most = max(most, tokens / (speed * left) if left > 0 else math.inf)
    return most


@dataclass
class Speed:
    """Output tokens per second of all servers, while lines wait for them."""

    tokens: float = 0.0
    seconds: float = 0.0
    expected: float = 0.0
    """Tokens per second that somebody predicts, until they are measured; 0 if nobody does."""

    @property
    def rate(self) -> float:
        """Tokens per second; 0 until it is known."""
        return self.tokens / self.seconds if self.seconds >= FEWEST_S else self.expected

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the tokens of some seconds."""
        share = math.exp(-seconds / MEMORY_S)
        self.tokens = share * self.tokens + tokens
        self.seconds = share * self.seconds + seconds


@dataclass
class Lengths:
    """Mean length of answers."""

    tokens: int = 0
    answers: int = 0

    def observe(self, tokens: int) -> None:
        """Record an answer."""
        self.tokens += tokens
        self.answers += 1

    def mean(self, usual: float = LINE_TOKENS) -> float:
        """Expected tokens of the next answer, if those of other batches have `usual` tokens."""
        return (self.tokens + PRIOR_LINES * usual) / (self.answers + PRIOR_LINES)


@dataclass
class Shares:
    """Expected output tokens of the lines of each tenant that were asked of late."""

    tokens: dict[str, float] = field(default_factory=dict)

    def observe(self, tenant: str, tokens: float) -> None:
        """Record a line that is asked, with its expected tokens."""
        self.tokens[tenant] = self.tokens.get(tenant, 0.0) + tokens

    def fade(self, seconds: float) -> None:
        """Let what was served fade."""
        share = math.exp(-seconds / MEMORY_S)
        self.tokens = {tenant: share * each for tenant, each in self.tokens.items()}
