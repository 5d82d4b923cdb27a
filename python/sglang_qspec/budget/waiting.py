"""How long a pass waits for more of its step drafts: as long as that gains, and no longer."""

from __future__ import annotations

PROBE_AFTER = 64
"""Passes without a wait after which one is tried again, however long the last ones took."""
MEMORY = 0.2
"""Weight of the latest wait."""
MARGIN = 1.3
"""How much more a wait has to gain than it is expected to cost."""


class Patience:
    """Weighs what a wait gains against what it costs.

    With drafts as they are a pass yields so many tokens per second. One more token on the drafts of
    its requests adds its chances of acceptance; that is worth waiting for if these tokens come at a
    better rate. A wait ends at the latest when nothing can be gained by it any more, so a sidecar
    that is slow or gone costs little, and soon nothing: how long tokens took to come, or did not
    come, is remembered by the number of requests.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Until a token came, by the binary order of magnitude of the requests."""
        self._idle = 0

    def seconds(self, requests: int, gain: float, rate: float) -> float:
        """How long to wait at most; 0 if not at all.

        `gain` is the expected number of tokens that the next step of the drafts adds to the pass,
        `rate` the pass's expected tokens per second without them.
        """
        if gain <= 0.0 or rate <= 0.0:
            return 0.0
        most = gain / rate
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
