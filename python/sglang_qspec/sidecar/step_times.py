"""What passes that advance step drafts take, for the server that weighs them against its own."""

from __future__ import annotations

MEMORY = 0.1
"""Weight of the latest pass in what passes of its size take."""
MOST_READ = 4
"""Tokens for each completion that a step reads at most, one of them drafted in the step before and
the others in their place; what reads more begins a draft."""


class StepTimes:
    """Totals since the start, and what a pass takes by its size."""

    def __init__(self) -> None:
        self.passes = 0
        self.tokens = 0
        """Step draft tokens that these passes gave."""
        self.seconds = 0.0
        self._by_size: dict[int, tuple[float, float]] = {}
        """Size and seconds of passes, averaged within each binary order of magnitude."""

    def observe(self, size: int, tokens: int, read: int, seconds: float) -> None:
        """A pass advanced `size` completions, read so many tokens and gave so many of steps."""
        self.passes += 1
        self.tokens += tokens
        self.seconds += seconds
        if read > MOST_READ * size:
            return
        key = size.bit_length()
        mean_size, mean_seconds = self._by_size.get(key, (float(size), seconds))
        # A machine that was busy for a moment is no news about passes.
        seconds = min(seconds, 2 * mean_seconds)
        self._by_size[key] = (
            mean_size + MEMORY * (size - mean_size),
            mean_seconds + MEMORY * (seconds - mean_seconds),
        )

    @property
    def by_size(self) -> list[tuple[float, float]]:
        """(completions, seconds) of a pass for each order of magnitude seen, the smallest first."""
        return [self._by_size[key] for key in sorted(self._by_size)]
