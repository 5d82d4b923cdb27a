"""Turns an exception in QSPEC into the end of speculation instead of the end of the server.

An exception in a hook or a worker ends SGLang's scheduler and fails all requests. No answer depends
on the work that QSPEC does between two target passes, so this work runs inside `guarded` blocks.
After an exception every request is decoded without drafts until the server restarts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from sglang_qspec.engine import speculation

logger = logging.getLogger(__name__)


def guarded(what: str) -> AbstractContextManager[None]:
    """A context that ends speculation and logs the error if its block raises.

    `what` completes "Speculation failed while ...", such as "admitting requests". No target pass
    may depend on the block.
    """
    return _Guarded(what)


class _Guarded(AbstractContextManager[None]):
    """The context of `guarded`; every pass enters several, and a generator takes longer."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        end_speculation(self._what)
        return True


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Log the error if the block raises, which only reads the fields of one request.

    Speculation continues, and the request goes on without what the block would have begun. `what`
    completes "A request could not be read while ...".
    """
    try:
        yield
    except Exception as error:
        logger.warning(
            "A request could not be read while %s (%s: %s); it goes on without this",
            what,
            type(error).__name__,
            error,
        )


def end_speculation(what: str) -> None:
    """End speculation because of the exception being handled; `what` is as in `guarded`.

    Closes the link to the sidecar. Ends a sidecar that this server started, to free its memory.
    Later errors may recur in every pass, so they are logged at level DEBUG.
    """
    if speculation.failed():
        logger.debug("Another error after speculation ended, while %s", what, exc_info=True)
        return
    logger.exception(
        "Speculation failed while %s; decoding continues without drafts until the server restarts",
        what,
    )
    _end()


def follow(rank: int) -> None:
    """End speculation because it has failed on this rank of the target."""
    if not speculation.failed():
        logger.error(
            "Speculation failed on rank %d of the target; decoding continues without drafts until "
            "the server restarts",
            rank,
        )
        _end()


def _end() -> None:
    ended = speculation.deactivate()
    try:
        if ended is not None:
            ended.close()
    except Exception:
        logger.exception("The sidecar could not be stopped; it exits when the server exits")
