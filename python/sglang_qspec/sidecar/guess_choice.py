"""Decides which guesses of a draft model's own head a pass of the model verifies.

A guess takes a further row of the pass, and a right one gives a further token. So the pass gets the
guesses that raise its tokens per second, by the measured seconds of passes and by how often guesses
of about the same probability were right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from sglang_qspec.sidecar.pass_times import PassTimes

LEVELS = 10
"""Number of ranges of probability for which right guesses are counted."""
DECAY = 0.99
"""Weight of the count of a range after one further guess."""
PRIOR = 4.0
"""Number of guesses that the head's own probability stands for, before others are known."""
MEMORY = 0.1
"""Weight of the latest pass in the mean gain, and of the latest call in the mean time of a call."""
MEMORY_OFF = 0.5
"""Weight of a pass that explores in the mean gain; such passes are few."""
EXPLORE = 16
"""Of the passes of a size for which guesses do not pay, one in this number asks the head anyway."""


class GuessChoice:
    """Owns what is known about guesses and their cost."""

    def __init__(self) -> None:
        self._times = PassTimes()
        self._call_s = 0.0
        """Mean seconds of a call of the head; 0 before the first."""
        self._counts = [(PRIOR * (level + 0.5) / LEVELS, PRIOR) for level in range(LEVELS)]
        """Numbers of right guesses and of all guesses by probability; older ones count less."""
        self._gains: dict[int, float] = {}
        """Mean of the tokens per second with guesses over those without, by the binary order of
        magnitude of the number of completions; calls of the head are part of the time."""
        self._passed = 0
        """Number of passes since the last one that explored."""
        self._explores = False
        """Whether the next pass verifies a guess in any case, to measure what its row costs."""

    def expect(self, times: Iterable[tuple[int, float]]) -> None:
        """Take (rows, seconds) of passes before the first request as the first means."""
        self._times.expect(times)

    def asks(self, completions: int) -> bool:
        """Whether the head should guess for a pass over this number of completions."""
        if self._gains.get(completions.bit_length(), 1.0) >= 1.0:
            return True
        self._passed += 1
        if self._passed >= EXPLORE:
            self._passed, self._explores = 0, True
            return True
        return False

    def choose(self, completions: int, probabilities: Sequence[float]) -> list[int]:
        """The places of the guesses that a pass verifies.

        `probabilities` are those of the head; a pass without guesses has a row for each of the
        `completions`, and gives as many tokens.
        """
        expected = [self._expected(each) for each in probabilities]
        order = sorted(range(len(expected)), key=lambda place: -expected[place])
        plain = completions / max(1e-9, self._times.at(completions))
        best, most = 0, plain
        for count, right in enumerate(accumulate(expected[place] for place in order), 1):
            rate = (completions + right) / max(1e-9, self._times.at(completions + count))
            if rate > most:
                best, most = count, rate
        seconds = self._times.at(completions)
        cost = 1.0 + self._call_s / seconds if seconds else 1.0
        key = completions.bit_length()
        gain = most / plain / cost
        mean = self._gains.get(key, gain)
        self._gains[key] = mean + (MEMORY if mean >= 1.0 else MEMORY_OFF) * (gain - mean)
        if self._explores:
            best, self._explores = max(best, 1), False
        return order[:best]

    def observe_pass(self, rows: int, seconds: float) -> None:
        """Record a pass over completions and guesses with this number of rows together."""
        self._times.observe(rows, seconds)

    def observe_call(self, seconds: float) -> None:
        """Record a call of the head."""
        mean = self._call_s or seconds
        self._call_s = mean + MEMORY * (min(seconds, 2 * mean) - mean)

    def judge(self, probability: float, *, right: bool) -> None:
        """Record whether a guess with this probability of the head was right."""
        level = _level(probability)
        hits, guesses = self._counts[level]
        self._counts[level] = DECAY * hits + right, DECAY * guesses + 1.0

    def _expected(self, probability: float) -> float:
        hits, guesses = self._counts[_level(probability)]
        return hits / guesses


def _level(probability: float) -> int:
    return min(LEVELS - 1, int(probability * LEVELS))
