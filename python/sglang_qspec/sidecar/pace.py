"""Measures how fast the drafter works, and how long first completions become."""

from __future__ import annotations

import math

MEMORY_S = 5.0
"""Time constant, in seconds of passes, of the mean speed."""
LENGTH_MEMORY = 0.05
"""Weight of the latest first completion in the mean length."""


class Pace:
    """The drafter's recent speed, and the recent length of its first completions."""

    def __init__(self) -> None:
        self._tokens = 0.0
        """Tokens of recent passes; older passes weigh less."""
        self._seconds = 0.0
        """Durations of the same passes, with the same weights."""
        self.length: float | None = None
        """Mean length of a finished first completion, in tokens; None before the first."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens drafted in a second of passes; None before the first token."""
        return self._tokens / self._seconds if self._tokens and self._seconds else None

    def observe_pass(self, tokens: int, seconds: float) -> None:
        """Record a pass that drafted `tokens` tokens in `seconds`."""
        keep = math.exp(-seconds / MEMORY_S)
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds

    def observe_length(self, tokens: int) -> None:
        """Record a first completion that ended by itself or reached its maximum length."""
        length = tokens if self.length is None else self.length
        self.length = length + LENGTH_MEMORY * (tokens - length)
