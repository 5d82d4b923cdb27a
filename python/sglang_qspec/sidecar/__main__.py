"""`python -m sglang_qspec.sidecar`: draft for the servers that connect to an endpoint.

The sidecar selects its CPUs and devices before it imports torch, because torch reads the number of
threads, and CUDA the visible devices, only once.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

from setproctitle import getproctitle

from sglang_qspec import values
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.link import descriptors
from sglang_qspec.sidecar import forks, hardware
from sglang_qspec.sidecar.child_process import UNUSABLE
from sglang_qspec.sidecar.options import parser
from sglang_qspec.sidecar.stopping import end_with_parent, stop_signal

logger = logging.getLogger("sglang_qspec.sidecar")


def main(argv: list[str]) -> int:
    """Run until SIGTERM, SIGINT or the parent's end.

    Returns 0; UNUSABLE if the settings or the draft model cannot work; or 1 after any other
    QSpecError, after which a new start may help.
    """
    options = parser().parse_args(argv)
    title = getproctitle()  # a title can be set later only if this comes before a change of environ
    logging.basicConfig(
        level=logging.WARNING, format="[%(asctime)s] sidecar: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("sglang_qspec").setLevel(logging.INFO)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    descriptors.raise_limit()
    if not options.fork_server:  # which looks after its parent itself, and has one thread
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
        # These import torch, so they follow the settings above.
        from sglang_qspec.sidecar import loading, service

        if not options.fork_server:
            return service.run(options, kind, yields=yields)
        loading.import_modules()
        return forks.serve(partial(service.run, options, kind, yields=yields), title)
    except QSpecError as error:
        logger.error("%s", error)
        return UNUSABLE if _is_final(error) else 1


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
