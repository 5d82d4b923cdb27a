"""`python -m sglang_qspec.sidecar`: draft for the servers that connect to an endpoint.

Nothing heavy is imported before the processors and devices are settled: torch reads the number of
threads, and CUDA the devices that it may see, only once.
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

from sglang_qspec.config import MAX_SERVER_TOKENS, QSpecConfig, parse_cores
from sglang_qspec.errors import ConfigError, QSpecError
from sglang_qspec.link import descriptors

logger = logging.getLogger("sglang_qspec.sidecar")


def main(argv: list[str]) -> int:
    """Run until SIGTERM, SIGINT or the end of the parent; 0 then, 1 if it could not start."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING, format="[%(asctime)s] sidecar: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("sglang_qspec").setLevel(logging.INFO)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    descriptors.raise_limit()
    if options.parent_pid is not None:
        from sglang_qspec.sidecar.watch import end_with_parent

        end_with_parent(options.parent_pid)
    try:
        kind = _settle_device(options.device)
        _settle_cores(options.cores)
        if kind == "cpu" and options.parent_pid is not None and not options.cores:
            _yield_cores()
        return _run(options, kind)
    except QSpecError as error:
        logger.error("%s", error)
        return 1


def _run(options: argparse.Namespace, kind: str | None) -> int:
    # Here, because these import torch.
    from sglang_qspec.link import LinkServer, keys
    from sglang_qspec.messages import PROTOCOL, Heartbeat, Welcome
    from sglang_qspec.sidecar.draft_model import DraftModel, DraftModelOptions
    from sglang_qspec.sidecar.drafter import Drafter
    from sglang_qspec.sidecar.loop import serve

    began = time.monotonic()
    key_pair = keys.load(options.key_file) if options.key_file else None
    model = DraftModel(
        DraftModelOptions(
            model_path=options.model_path,
            revision=options.revision,
            quantization=options.quantization,
            dtype=options.dtype,
            device=kind,
            mem_fraction=options.mem_fraction,
            max_total_tokens=options.max_total_tokens,
            context_len=options.context_length,
            batch=options.slots,
            trust_remote_code=options.trust_remote_code,
        )
    )
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    drafter = Drafter(
        model,
        slots=options.slots,
        max_completion_tokens=options.max_completion_tokens,
        prefill_tokens=options.prefill_tokens or model.prefill_tokens,
        apart=model.device.startswith("cpu"),
        share=options.share_between_servers,
        max_server_tokens=options.max_server_tokens,
    )
    welcome = Welcome(
        PROTOCOL,
        model.name,
        model.vocab_size,
        model.context_len,
        # The outputs of these texts take the other half.
        max_text_tokens=options.max_server_tokens // 2,
    )
    server = LinkServer(
        options.endpoint,
        welcome,
        model.fingerprint(),
        lambda: Heartbeat(
            drafter.requests,
            drafter.rows,
            drafter.drafted_tokens,
            server.dropped,
            step_passes=drafter.step_times.passes,
            step_tokens=drafter.step_times.tokens,
            step_seconds=drafter.step_times.seconds,
            step_times=drafter.step_times.by_size,
            texts=drafter.texts,
            kv_rows=model.open_rows,
            kv_tokens=model.total_tokens - model.free_tokens,
        ),
        key_pair,
    )
    logger.info(
        "drafts with %s (%s, %s) on %s, %d tokens of KV, at %s; loaded in %.0f ms",
        model.name,
        model.quantization or "not quantized",
        model.dtype,
        model.device,
        model.total_tokens,
        server.endpoint,
        (time.monotonic() - began) * 1e3,
    )
    try:
        serve(drafter, server, stopping.is_set)
    finally:
        server.close()
        _clear_socket(server.endpoint, options.parent_pid)
        model.unload()
    logger.info("ends after %d drafted tokens", drafter.drafted_tokens)
    return 0


def _parser() -> argparse.ArgumentParser:
    default = QSpecConfig()
    parser = argparse.ArgumentParser(prog="python -m sglang_qspec.sidecar", description=__doc__)
    add = parser.add_argument
    add("--model-path", required=True, help="the draft model: a local checkpoint or a name")
    add("--revision", help="branch, tag or commit of a model on a hub; by default the hub's")
    add("--endpoint", required=True, help="ipc://PATH or tcp://HOST:PORT to serve at")
    add("--quantization", help="how SGLang quantizes the weights; by default as the checkpoint is")
    add("--dtype", default=default.dtype, help="activation type")
    add("--device", default="", help="cpu, cuda or cuda:N; by default what SGLang finds")
    add("--cores", default="", help="processors to run on, such as 1 or 2-5")
    add("--mem-fraction", type=float, default=default.mem_fraction, help="of the device's memory")
    add("--max-total-tokens", type=int, help="tokens of KV, at most")
    add("--context-length", type=int, help="longest prompt and completion, if not the model's")
    add("--slots", type=int, default=default.draft_slots, help="completions decoded at a time")
    add("--max-completion-tokens", type=int, default=default.max_completion_tokens)
    add("--prefill-tokens", type=int, help="prompt tokens read between two decode passes")
    add(
        "--share-between-servers",
        action="store_true",
        help="draft equal prompts of several servers once, and share their KV. A server can then "
        "tell from how soon a draft comes that another one has been asked the same, and gets "
        "drafts that were drawn with the sampling seeds of the other's requests; by default "
        "nothing of one server reaches another",
    )
    add(
        "--max-server-tokens",
        type=_positive,
        default=MAX_SERVER_TOKENS,
        help="tokens of texts, and tokens of drafts, that are kept for one server "
        "(default: %(default)s)",
    )
    add("--key-file", default="", help="authenticates both ends of a tcp endpoint")
    add("--trust-remote-code", action="store_true", help="let the model bring its own code")
    add("--parent-pid", type=int, help="end when this parent process is gone")
    return parser


def _positive(text: str) -> int:
    """Raises ArgumentTypeError unless the text is a whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, but must be a whole number from 1 on")
    return value


def _settle_device(device: str) -> str | None:
    """Let this process see only its device; `cpu`, `cuda` or None for SGLang's choice."""
    kind, _, index = device.partition(":")
    if kind not in ("", "cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"--device is {device!r}, but must be cpu, cuda or cuda:N")
    if kind == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "cuda":
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
        if index:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = visible.split(",") if visible else [str(i) for i in range(int(index) + 1)]
            if int(index) >= len(names):
                raise ConfigError(f"--device is {device!r}, but only {visible} are visible")
            os.environ["CUDA_VISIBLE_DEVICES"] = names[int(index)]
    return kind or None


def _settle_cores(text: str) -> None:
    """Run on these processors, one thread on each."""
    try:
        cores = parse_cores(text)
        if not cores:
            return
        os.sched_setaffinity(0, cores)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--cores is {text!r}: {error}") from None
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(cores)))


def _yield_cores() -> None:
    """On the processors of the server that started this sidecar, take only what it leaves idle."""
    os.nice(19)
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))


def _clear_socket(endpoint: str, parent_pid: int | None) -> None:
    """ZMQ leaves the socket's file behind; a server that was killed leaves its directory too."""
    from sglang_qspec.link import remove_private

    if endpoint.startswith("ipc://"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(endpoint.removeprefix("ipc://"))
        if parent_pid is not None and os.getppid() != parent_pid:
            remove_private(endpoint)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # Everything is given back; tearing down torch and SGLang module by module would take seconds.
    os._exit(code)
