"""How long a pass waits for more step-draft tokens; the rule depends on the pipeline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.policy.width import Choice
from sglang_qspec.trie import DraftTrees

PROBE_AFTER = 64
"""Number of passes without a wait after which the server tries a wait again."""
MEMORY = 0.2
"""Weight of the latest wait in the expected wait."""
MARGIN = 1.3
"""Minimum ratio of a wait's gain to its expected length."""
LATE = 4.0
"""Maximum wait in `sequential` and `halves`, in draft steps. It is above 1 because the sidecar may
first have to finish another pass, or to prefill the target's tokens after a divergence."""
FIRST_STEP = 0.05
"""Assumed seconds of a draft step before any was measured."""
SHORTEST_STEP = 0.002
"""Lower limit of a draft step in seconds, so that a short load peak causes no miss."""
LONGEST_WAIT = 0.5
"""Upper limit of a wait in seconds, whatever step time the sidecar reports."""


def with_next_steps(
    trees: DraftTrees, awaited: NDArray[np.bool_], agreement: float
) -> NDArray[np.float32]:
    """Scores [bs, D] of the trees if each `awaited` [bs] step draft had one more token.

    The new token's score is the lowest step-draft score of its tree, times `agreement`.
    """
    chances = np.where(trees.steps, trees.scores, np.float32(1.0)).min(axis=1, keepdims=True)
    more = np.where(awaited[:, None], np.float32(agreement) * chances, np.float32(0.0))
    scores = np.concatenate([trees.scores, more], axis=1)
    scores[:, 1:] = -np.sort(-scores[:, 1:], axis=1)
    return scores[:, : trees.width]


class WaitBudget:
    """Maximum wait for one more draft token in the pipeline `ahead`.

    A pass with one more token on each awaited draft yields more tokens, and may take longer. It
    saves the time that its tokens would take at the present pass's rate, minus its own time. We
    wait at most that long, and only if tokens usually arrive earlier. The usual wait is learnt for
    each binary order of magnitude of the batch size, so a dead sidecar soon causes no waits.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Expected wait in seconds by the binary order of magnitude of the batch size."""
        self._idle = 0
        """Number of consecutive passes without a wait, because tokens were expected too late."""

    def seconds(self, requests: int, now: Choice, then: Choice) -> float:
        """Maximum wait in seconds; 0 means no wait.

        `now` is the pass with the present drafts, `then` the pass with one more token on each of
        them.
        """
        most = then.tokens / now.rate - then.seconds
        if most <= 0.0:
            return 0.0
        expected = self._seconds.get(requests.bit_length(), 0.0)
        if expected * MARGIN < most:
            self._idle = 0
            return most
        self._idle += 1
        if self._idle < PROBE_AFTER:
            return 0.0
        self._idle = 0
        return most

    def observe(self, requests: int, waited: float, came: bool) -> None:
        """Record a wait of `waited` seconds, and whether draft tokens came."""
        key = requests.bit_length()
        took = waited if came else 2 * waited
        before = self._seconds.get(key, took)
        self._seconds[key] = before + MEMORY * (took - before)


class DraftDeadline:
    """Maximum wait for the next draft token in the pipelines `sequential` and `halves`.

    A pass waits `LATE` times as long as the sidecar takes for a draft step. After a miss the pass
    runs without the token, and the next passes do not wait at all: their number doubles with each
    consecutive miss, up to `PROBE_AFTER`.
    """

    def __init__(self) -> None:
        self._misses = 0
        """Number of consecutive waits in which no token arrived."""
        self._left_out = 0
        """Number of passes that still run without a wait."""

    def seconds(self, step_seconds: float | None) -> float:
        """Maximum wait in seconds for the next token; 0 means no wait.

        `step_seconds` is the time of one draft step; None before any was measured.
        """
        if self._left_out:
            self._left_out -= 1
            return 0.0
        step = max(SHORTEST_STEP, FIRST_STEP if step_seconds is None else step_seconds)
        return min(LATE * step, LONGEST_WAIT)

    def observe(self, came: bool) -> None:
        """Record whether draft tokens came during the wait."""
        if came:
            self._misses = 0
            return
        self._left_out = min(1 << self._misses, PROBE_AFTER)
        self._misses += 1
