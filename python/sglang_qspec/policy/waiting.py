"""How long a pass waits for more of its step drafts, which depends on the pipeline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_qspec.policy.width import Choice
from sglang_qspec.trie import DraftTrees, Source

PROBE_AFTER = 64
"""Passes without a wait after which one is tried again, however long the last ones took."""
MEMORY = 0.2
"""Weight of the latest wait."""
MARGIN = 1.3
"""How much more a wait has to gain than it is expected to cost."""
LATE = 4.0
"""How many times as long as a step takes its tokens are waited for where a pass is made for them:
the sidecar may have to end another pass first, or to read what the target has put in their place.
"""
FIRST_STEP = 0.05
"""Seconds that a step is taken for before any was measured."""
SHORTEST_STEP = 0.002
"""Seconds; that of a fast device, on a machine that is busy for a moment."""
LONGEST_WAIT = 0.5
"""Seconds, whatever the sidecar says that its steps take."""


def with_next_steps(
    trees: DraftTrees, awaited: NDArray[np.bool_], agreement: float
) -> NDArray[np.float32]:
    """The trees' scores [bs, D] if the step drafts of the `awaited` [bs] ones had one token more.

    It is right with the chance of `agreement` if all before it are.
    """
    is_step = (trees.sources == Source.STEP) & (trees.scores > 0)
    chances = np.where(is_step, trees.scores, np.float32(1.0)).min(axis=1, keepdims=True)
    more = np.where(awaited[:, None], np.float32(agreement) * chances, np.float32(0.0))
    scores = np.concatenate([trees.scores, more], axis=1)
    scores[:, 1:] = -np.sort(-scores[:, 1:], axis=1)
    return scores[:, : trees.width]


class WaitBudget:
    """Weighs what a wait gains against what it costs.

    With drafts as they are a pass yields so many tokens per second. With one token more on the
    drafts of its requests it yields more, and may have to be wider for that: what it then saves is
    what the tokens would have taken at the former rate, less the time of the pass. A wait ends at
    the latest when it has cost as much, so a sidecar that is slow or gone costs little, and soon
    nothing: how long tokens took to come, or did not come, is remembered by the number of requests.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Until a token came, by the binary order of magnitude of the requests."""
        self._idle = 0

    def seconds(self, requests: int, now: Choice, then: Choice) -> float:
        """How long to wait at most; 0 if not at all.

        `now` is the pass with drafts as they are, `then` that with one more token on each of them.
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
        """A wait of `waited` seconds has ended, because something came or was given up."""
        key = requests.bit_length()
        took = waited if came else 2 * waited
        before = self._seconds.get(key, took)
        self._seconds[key] = before + MEMORY * (took - before)


class DraftDeadline:
    """How late the drafts may be that a pass is made for, as in sequential speculation and halves.

    Their next token is waited for some times as long as the sidecar takes for a step. When none has
    come by then the pass goes on without, and so do the next ones: twice as many each time until
    one comes again.
    """

    def __init__(self) -> None:
        self._misses = 0
        self._left_out = 0

    def seconds(self, step_seconds: float | None) -> float:
        """How long to wait for the next token at most; 0 if not at all.

        `step_seconds` is what a step takes; None before any was measured.
        """
        if self._left_out:
            self._left_out -= 1
            return 0.0
        step = max(SHORTEST_STEP, FIRST_STEP if step_seconds is None else step_seconds)
        return min(LATE * step, LONGEST_WAIT)

    def observe(self, came: bool) -> None:
        """A wait has ended, because something came or was given up."""
        if came:
            self._misses = 0
            return
        self._left_out = min(1 << self._misses, PROBE_AFTER)
        self._misses += 1
