"""`python -m sglang_qspec.sidecar`: draft for the servers that connect to an endpoint.

The sidecar selects its CPUs and devices before it imports torch, because torch reads the number of
threads, and CUDA the visible devices, only once.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from sglang_qspec import config, values
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.link import descriptors
from sglang_qspec.messages import PROTOCOL, Heartbeat, Welcome
from sglang_qspec.sidecar import log_thread
from sglang_qspec.sidecar.child_process import UNUSABLE
from sglang_qspec.sidecar.options import parser

if TYPE_CHECKING:
    from sglang_qspec.link import LinkServer
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.drafter import Drafter

logger = logging.getLogger("sglang_qspec.sidecar")


def main(argv: list[str]) -> int:
    """Run until SIGTERM, SIGINT or the parent's end.

    Returns 0; UNUSABLE if the settings or the draft model cannot work; or 1 after any other
    QSpecError, after which a new start may help.
    """
    options = parser().parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING, format="[%(asctime)s] sidecar: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("sglang_qspec").setLevel(logging.INFO)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    descriptors.raise_limit()
    for pid in filter(None, (options.parent_pid, options.supervisor_pid)):
        from sglang_qspec.sidecar.parent_watch import end_with_parent

        end_with_parent(pid)
    try:
        _check_model(options.model_path)
        if options.replicas > 1:
            from sglang_qspec.sidecar import replicas

            return replicas.run(options, argv, _stop_signal())
        kind = settle_device(options.device)
        settle_cores(options.cores)
        yields = kind == "cpu" and options.parent_pid is not None and not options.cores
        if yields:
            halve_threads()
        if kind != "cpu" and options.parent_pid is not None:
            _yield_gpu()
        return _run(options, kind, yields=yields)
    except QSpecError as error:
        logger.error("%s", error)
        return UNUSABLE if _is_final(error) else 1


def _check_model(path: str) -> None:
    """Raise ConfigError for a folder that does not exist, before torch and SGLang are imported."""
    try:
        values.model(path)
    except ValueError as error:
        raise ConfigError(f"--model-path is {path!r}, but must be {error}") from None


def _stop_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set from now on."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


def _is_final(error: QSpecError) -> bool:
    """Whether a new start would fail like this one."""
    if isinstance(error, ConfigError):
        return True
    from sglang_qspec.sidecar.loading import LoadError

    return isinstance(error, LoadError) and error.is_final


def _run(options: argparse.Namespace, kind: str | None, *, yields: bool) -> int:
    # These import torch, so they follow the settings of CPUs and device.
    from sglang_qspec.link import LinkServer, keys
    from sglang_qspec.sidecar.loop import serve

    began = time.monotonic()
    key_pair = keys.load_for(options.endpoint, options.key_file)
    metrics = None
    if options.metrics_port:
        from sglang_qspec.sidecar.metrics import SidecarMetrics

        metrics = SidecarMetrics(options.metrics_host, options.metrics_port)
    model = _load(options, kind)
    stopping = _stop_signal()
    drafter = _drafter(options, model)
    server = LinkServer(
        options.endpoint,
        _welcome(options, model),
        model.fingerprint(),
        lambda: _heartbeat(drafter, model, server),
        key_pair,
    )
    logger.info(
        "loaded %s (%s, %s) on %s with %d KV slots in %.0f ms; listening at %s",
        model.name,
        model.quantization or "not quantized",
        model.dtype,
        model.device,
        model.rows.total_slots,
        (time.monotonic() - began) * 1e3,
        server.endpoint,
    )
    if options.background or yields:  # only now, because loading needs CPU time to end
        lower_priority(idle=options.background)
    try:
        publish = None if metrics is None else partial(metrics.publish, drafter, model, server)
        serve(drafter, server, stopping.is_set, publish)
    finally:
        server.close()
        _clear_socket(server.endpoint, options.parent_pid)
        model.unload()
    logger.info("stopped after %d drafted tokens", drafter.drafted_tokens)
    return 0


def _load(options: argparse.Namespace, kind: str | None) -> DraftModel:
    """Load the draft model on a device of this kind; None lets SGLang choose."""
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    return DraftModel(
        DraftModelOptions(
            model_path=options.model_path,
            revision=options.revision,
            quantization=options.quantization,
            dtype=options.dtype,
            device=kind,
            mem_fraction=options.mem_fraction or None,
            max_total_tokens=options.max_total_tokens,
            context_len=options.context_length,
            batch=options.slots,
            prefill_tokens=options.prefill_tokens,
            attention_backend=options.attention_backend,
            trust_remote_code=options.trust_remote_code,
        )
    )


def _drafter(options: argparse.Namespace, model: DraftModel) -> Drafter:
    from sglang_qspec.sidecar.drafter import Drafter

    return Drafter(
        model,
        slots=options.slots,
        max_completion_tokens=options.max_completion_tokens,
        prefill_tokens=model.prefill_tokens,
        apart=model.device.startswith("cpu"),
        share=options.share_between_servers,
        max_server_tokens=options.max_server_tokens,
        max_backlog_s=options.max_backlog,
    )


def _welcome(options: argparse.Namespace, model: DraftModel) -> Welcome:
    """The answer to a server's Hello."""
    return Welcome(
        PROTOCOL,
        model.name,
        model.vocab_size,
        model.rows.context_len,
        # The other half is for the outputs that follow these texts.
        max_text_tokens=options.max_server_tokens // 2,
    )


def _heartbeat(drafter: Drafter, model: DraftModel, server: LinkServer) -> Heartbeat:
    """The present load and counters of the sidecar."""
    return Heartbeat(
        drafter.requests,
        drafter.rows,
        drafter.drafted_tokens,
        server.dropped,
        step_passes=drafter.step_times.passes,
        step_tokens=drafter.step_times.tokens,
        step_seconds=drafter.step_times.seconds,
        step_times=drafter.step_times.by_size,
        texts=drafter.texts,
        kv_rows=model.rows.open_rows,
        kv_tokens=model.rows.total_slots - model.rows.free_slots,
        backlog_s=drafter.backlog_s,
        overload=drafter.overload,
    )


def settle_device(device: str) -> str | None:
    """Hide other devices from this process; return `cpu`, `cuda`, or None for SGLang's choice."""
    try:
        kind, _, index = values.device(device).partition(":")
    except ValueError as error:
        raise ConfigError(f"--device is {device!r}, but must be {error}") from None
    if kind == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "cuda":
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
        _settle_gpu(device, index)
    return kind or None


def _settle_gpu(device: str, index: str) -> None:
    """Hide all visible GPUs except number `index`; an empty text hides none."""
    visible = config.visible_gpus()
    if visible is None:
        names = [str(number) for number in range(int(index or 0) + 1)]
    else:
        names = [] if visible in ("", "-1") else visible.split(",")
    if int(index or 0) >= len(names):
        most = f"N must be at most {len(names) - 1}" if names else "no GPU is visible"
        raise ConfigError(
            f"--device is {device!r}, but CUDA_VISIBLE_DEVICES is {visible!r}, so {most}"
        )
    if index:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[int(index)]


def settle_cores(text: str) -> None:
    """Run on the CPUs in the list `text`, with one thread on each."""
    try:
        cores = values.parse_cores(text)
        if not cores:
            return
        os.sched_setaffinity(0, cores)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--cores is {text!r}: {error}") from None
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(cores)))


def lower_priority(*, idle: bool) -> None:
    """Run at the lowest priority or, with `idle`, only while nothing else wants the CPUs.

    At the lowest priority alone, Linux lets a process end its time slice of some milliseconds
    before a thread of the target that wakes up gets the CPU. A process of the idle class gives way
    at once. Where that class is not allowed, the lowest priority remains. Both belong to a thread,
    and new threads take over those of the thread that starts them. The thread that writes the log
    keeps its priority (`log_thread`).
    """
    threads = os.listdir("/proc/self/task")
    log_thread.begin()
    for thread in map(int, threads):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, 19)
            if idle:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def halve_threads() -> None:
    """Run half the threads on the CPUs of the starting server."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))


def _yield_gpu() -> None:
    """Let kernels of the server go first if sidecar and server share a GPU through CUDA MPS.

    CUDA reads the variable when the process initializes it; 1 is "below normal". Without MPS the
    GPU switches between the two processes, whatever their priorities are.
    """
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")


def _clear_socket(endpoint: str, parent_pid: int | None) -> None:
    """Remove the socket file, which ZMQ leaves behind, and the directory of a killed server."""
    from sglang_qspec.link import remove_private

    if endpoint.startswith("ipc://"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(endpoint.removeprefix("ipc://"))
        if parent_pid is not None and os.getppid() != parent_pid:
            remove_private(endpoint)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # All resources are released; the interpreter's teardown of torch and SGLang takes seconds.
    os._exit(code)
