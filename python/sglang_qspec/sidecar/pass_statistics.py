"""Counts and durations of the draft model's passes.

The server selects its pipeline by the durations of passes that advance step drafts, and `Overload`
derives the backlog from the speed of all passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from sglang_qspec.sidecar.pass_times import PassTimes

SPEED_MEMORY_S = 5.0
"""Time constant, in seconds of passes, of the mean speed."""
LENGTH_MEMORY = 0.05
"""Weight of the latest first completion in the mean length."""
READ_MEMORY = 2048
"""Number of prompt tokens after which the mean duration of reading one counts half."""
MOST_READ = 4
"""Maximum number of tokens per completion in a pass for `step_times`. A longer pass prefills
a new draft, and is not a typical step."""


class PassStatistics:
    """Totals since the start, and means over recent passes."""

    def __init__(self) -> None:
        self.drafted_tokens = 0
        """Number of tokens drafted."""
        self.pass_seconds = 0.0
        """Total seconds of all passes."""
        self.step_passes = 0
        """Number of passes that advanced step drafts."""
        self.step_tokens = 0
        """Number of step draft tokens that these passes produced."""
        self.step_seconds = 0.0
        """Total seconds of the passes that advanced step drafts."""
        self.guessed_tokens = 0
        """Number of guesses of the draft model's own head that passes verified."""
        self.right_guesses = 0
        """Number of right ones, each of which gave a token."""
        self.completion_len: float | None = None
        """Mean length of a finished first completion, in tokens; None before the first."""
        self.read_seconds = 0.0
        """Mean seconds for which a prompt token is read; 0 before it is known."""
        self._recent_tokens = 0.0
        """Tokens of recent passes; older passes weigh less."""
        self._recent_seconds = 0.0
        """Durations of the same passes, with the same weights."""
        self._steps = PassTimes()
        """Seconds in which each completion of a step pass gets a token."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens drafted in a second of recent passes; None before the first token."""
        if not (self._recent_tokens and self._recent_seconds):
            return None
        return self._recent_tokens / self._recent_seconds

    @property
    def step_times(self) -> list[tuple[float, float]]:
        """Mean (completions, seconds) of a step pass by its size, the smallest size first.

        Where passes give more than a token for a completion, the seconds are those for one.
        """
        return self._steps.means

    def expect_steps(self, times: Iterable[tuple[int, float]]) -> None:
        """Take (completions, seconds) of passes before the first request as the first averages."""
        self._steps.expect(times)

    def observe_pass(self, tokens: int, seconds: float) -> None:
        """Record a pass that drafted `tokens` tokens in `seconds`."""
        self.pass_seconds += seconds
        keep = math.exp(-seconds / SPEED_MEMORY_S)
        self._recent_tokens = keep * self._recent_tokens + tokens
        self._recent_seconds = keep * self._recent_seconds + seconds

    def expect_reading(self, seconds: float) -> None:
        """Take the seconds for a prompt token before the first request as the first mean."""
        self.read_seconds = self.read_seconds or seconds

    def observe_reading(self, size: int, read: int, seconds: float) -> None:
        """Record a pass over `size` completions that computed KV for `read` tokens.

        It counts if it mostly reads prompts.
        """
        if read <= MOST_READ * size:
            return
        each = seconds / read
        mean = self.read_seconds or each
        weight = 1.0 - 0.5 ** (read / READ_MEMORY)
        self.read_seconds = mean + weight * (min(each, 2 * mean) - mean)

    def observe_step(
        self, size: int, tokens: int, read: int, seconds: float, *, drafted: int = 0
    ) -> None:
        """Record a pass that advanced `size` completions, step drafts among them, in `seconds`.

        It computed KV for `read` tokens, and produced `tokens` step draft tokens among `drafted`
        tokens, by default one for each completion.
        """
        self.step_passes += 1
        self.step_tokens += tokens
        self.step_seconds += seconds
        if read > MOST_READ * size:
            return
        self._steps.observe(size, seconds * size / max(size, drafted))

    def observe_length(self, tokens: int) -> None:
        """Record a first completion that ended by itself or reached its maximum length."""
        mean = tokens if self.completion_len is None else self.completion_len
        self.completion_len = mean + LENGTH_MEMORY * (tokens - mean)
