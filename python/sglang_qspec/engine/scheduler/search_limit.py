"""Limits the time that the search for a request's `stop_regex` may take.

SGLang searches the output with Python's `re` after every pass, in the scheduler. A pattern such as
`(a+)+$` takes time that doubles with each character of the output, and all other requests would
wait. CPython's search looks for signals, so that a timer can end it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 0.25
"""Maximum CPU time of the searches for one request after one pass. The search for an ordinary
pattern takes microseconds, and decoding an output of 100,000 tokens for it tens of milliseconds."""
_STEP = 0.01
"""Time in s between two looks at the limit, after the first."""


class SearchTooLongError(Exception):
    """The searches in a block of `search_limit` have taken longer than `SECONDS`."""


@contextmanager
def search_limit() -> Iterator[None]:
    """Raise `SearchTooLongError` in this block if it takes more CPU time than `SECONDS`.

    The timer counts the time of all threads of the process, so its signal may come early; the
    limit is on the time of this thread. Signals reach the main thread only, where SGLang's
    scheduler runs. In another thread the block has no limit. Nothing else in this process may use
    SIGVTALRM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end, is_active = time.thread_time() + SECONDS, True

    def check(number: int, frame: FrameType | None) -> None:
        nonlocal is_active
        # The last signal may arrive after the block.
        if is_active and time.thread_time() > end:
            # It may also arrive in the `finally`, and the error then skips the rest of it.
            is_active = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            raise SearchTooLongError

    signal.signal(signal.SIGVTALRM, check)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, _STEP)
    try:
        yield
    finally:
        is_active = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
