"""`python -m sglang_qspec.sidecar`: draft for the servers that connect to an endpoint.

The sidecar selects its CPUs and devices before it imports torch, because torch reads the number of
threads, and CUDA the visible devices, only once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from sglang_qspec import values
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.link import descriptors
from sglang_qspec.sidecar import hardware
from sglang_qspec.sidecar.child_process import UNUSABLE
from sglang_qspec.sidecar.options import parser
from sglang_qspec.sidecar.stopping import end_with_parent, stop_signal

logger = logging.getLogger("sglang_qspec.sidecar")


def main(argv: Sequence[str], *, forked: bool = False) -> int:
    """Run until SIGTERM, SIGINT or the parent's end.

    With `forked` this process is a fork of one that has imported torch, and ends with it.

    Returns 0; UNUSABLE if the settings or the draft model cannot work; or 1 after any other
    QSpecError, after which a new start may help.
    """
    options = parser().parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING,
        format="[%(asctime)s] sidecar: %(message)s",
        datefmt="%H:%M:%S",
        force=forked,  # a fork has the handlers of a server's scheduler
    )
    logging.getLogger("sglang_qspec").setLevel(logging.INFO)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    descriptors.raise_limit()
    if not forked:
        for pid in filter(None, (options.parent_pid, options.supervisor_pid)):
            end_with_parent(pid)
    try:
        _check_model(options.model_path)
        if options.replicas > 1:
            from sglang_qspec.sidecar import replicas  # this process only supervises others

            return replicas.run(options, argv, stop_signal())
        kind = hardware.settle_device(options.device)
        hardware.settle_cores(options.cores)
        yields = kind == "cpu" and options.parent_pid is not None and not options.cores
        if yields:
            hardware.halve_threads()
        if kind != "cpu" and options.parent_pid is not None:
            hardware.yield_gpu()
        from sglang_qspec.sidecar import service  # imports torch, so it follows these settings

        return service.run(options, kind, yields=yields)
    except QSpecError as error:
        logger.error("%s", error)
        return UNUSABLE if _is_final(error) else 1


def run_forked(argv: Sequence[str]) -> int:
    """`main` in a fork of a process that has imported torch."""
    return main(argv, forked=True)


def _check_model(path: str) -> None:
    """Raise ConfigError for a folder that does not exist, before torch and SGLang are imported."""
    try:
        values.model(path)
    except ValueError as error:
        raise ConfigError(f"--model-path is {path!r}, but must be {error}") from None


def _is_final(error: QSpecError) -> bool:
    """Whether a new start would fail like this one."""
    if isinstance(error, ConfigError):
        return True
    # It imports torch, which an error before that import must not take seconds for.
    from sglang_qspec.sidecar.loading import LoadError

    return isinstance(error, LoadError) and error.is_final


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # All resources are released; the interpreter's teardown of torch and SGLang takes seconds.
    os._exit(code)
