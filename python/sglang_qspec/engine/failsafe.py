"""An error of ours ends speculation, not the server.

SGLang's scheduler dies of an exception in a hook or a worker, and all requests with it. None of
what is done between two passes of the target is needed for a right answer, so it is done under a
guard; after an error every request is decoded plainly until the server is started again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_qspec.engine.requests import speculator

logger = logging.getLogger(__name__)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Do `what` no pass depends on; if it raises, speculation is over and the error is logged."""
    try:
        yield
    except Exception:
        end_speculation(what)


def end_speculation(what: str) -> None:
    """End speculation for the exception that is being handled, which `what` has met.

    The link to the sidecar is closed, and a sidecar that this server has started is ended, since
    it would keep its memory for nothing. Errors that come later, of what goes on without drafts,
    are logged at the level DEBUG, as they may come with each pass.
    """
    ended = speculator.deactivate()
    if ended is None:
        logger.debug("Another error after the end of speculation (%s)", what, exc_info=True)
        return
    logger.exception(
        "Speculation failed (%s) and is off until the server is started again; "
        "requests are decoded plainly",
        what,
    )
    try:
        ended.close()
    except Exception:
        logger.exception("The sidecar could not be ended; it ends with the server")
