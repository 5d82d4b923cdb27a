"""An error of ours ends speculation, not the server.

SGLang's scheduler dies of an exception in a hook or a worker, and all requests with it. None of
what is done between two passes of the target is needed for a right answer, so it is done under a
guard; after an error every request is decoded plainly until the server is started again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_qspec.engine import speculator

logger = logging.getLogger(__name__)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Do `what` no pass depends on; if it raises, speculation is over and the error is logged."""
    try:
        yield
    except Exception:
        speculator.deactivate()
        logger.exception(
            "Speculation failed (%s) and is off until the server is started again; "
            "requests are decoded plainly",
            what,
        )
