"""The fork server of the server's own sidecar on a CPU, a fork of the scheduler's process.

The fork comes first of all in that process: SGLang is imported then, and nothing has begun. So the
sidecar starts without imports of its own, and shares their memory with the scheduler.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading

from sglang_qspec.engine.placement import environment
from sglang_qspec.sidecar.fork_server import serve_forked
from sglang_qspec.sidecar.forks import ForkServer

logger = logging.getLogger(__name__)

_fork: ForkServer | None = None
"""The fork server, until `take` or `discard`."""
_has_begun = False
"""Whether `fork_scheduler` was called. A sidecar, a fork of this process, calls it again."""


def fork_scheduler(server_args: object, tp_rank: int, pp_rank: int) -> None:
    """Before `spawn_world_rank`, with which a scheduler's process begins.

    Fork the process of rank 0 if the server has a sidecar of its own on a CPU.
    """
    global _fork, _has_begun
    if _has_begun:
        return
    _has_begun = True
    placed = environment.read()
    if placed is None or not placed.may_fork:
        return
    # A process with threads cannot be forked safely.
    alone = threading.active_count() == 1
    if tp_rank or pp_rank or multiprocessing.parent_process() is None or not alone:
        return
    from sglang_qspec.sidecar import loading

    loading.import_modules()  # this process needs them soon too
    try:
        _fork = ForkServer.of_this_process(serve_forked)
    except OSError as error:
        logger.warning("the scheduler's process cannot be forked (%s)", error)


def take() -> ForkServer | None:
    """The fork server; None if there is none. The caller closes it."""
    global _fork
    taken, _fork = _fork, None
    return taken


def discard() -> None:
    """End a fork server that nothing has taken."""
    if (left := take()) is not None:
        left.close(grace_s=0.0)
