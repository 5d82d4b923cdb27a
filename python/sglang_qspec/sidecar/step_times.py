"""Durations of passes that advance step drafts; the server selects its pipeline by them."""

from __future__ import annotations

MEMORY = 0.1
"""Weight of the latest pass in the moving average of its size."""
MOST_READ = 4
"""Maximum number of tokens per completion in a pass for `by_size`. A longer pass prefills
a new draft, and is not a typical step."""


class StepTimes:
    """Totals since the start, and the mean duration of a pass by its size."""

    def __init__(self) -> None:
        self.passes = 0
        """Number of passes that advanced step drafts."""
        self.tokens = 0
        """Number of step draft tokens that these passes produced."""
        self.seconds = 0.0
        """Total duration of these passes, in seconds."""
        self._by_size: dict[int, tuple[float, float]] = {}
        """Mean size and mean seconds of passes, by the binary order of magnitude of the size."""

    def observe(self, size: int, tokens: int, read: int, seconds: float) -> None:
        """Record a pass that advanced `size` completions and took `seconds`.

        It computed KV for `read` tokens and produced `tokens` step draft tokens.
        """
        self.passes += 1
        self.tokens += tokens
        self.seconds += seconds
        if read > MOST_READ * size:
            return
        key = size.bit_length()
        mean_size, mean_seconds = self._by_size.get(key, (float(size), seconds))
        # A cap limits the effect of a short load peak.
        seconds = min(seconds, 2 * mean_seconds)
        self._by_size[key] = (
            mean_size + MEMORY * (size - mean_size),
            mean_seconds + MEMORY * (seconds - mean_seconds),
        )

    @property
    def by_size(self) -> list[tuple[float, float]]:
        """Mean (completions, seconds) of a pass by size, the smallest size first."""
        return [self._by_size[key] for key in sorted(self._by_size)]
