"""The time that QSPEC adds to a scheduler iteration, whatever its sidecar does.

A server without speculation and one with QSPEC, each with a stopwatch in its scheduler
(`overhead.probe`), decode 1, 16 and 64 requests at a time while others wait. Counted as added is
what QSPEC does in the scheduler's thread in an iteration that decodes:

- its hooks in the scheduler: polling the link, requests that come and end;
- the worker's call but for the target model's forward pass: polling, proposing trees, choosing the
  width, laying the trees out, sampling and accepting, moving KV, settling;
- less what a plain decode step spends around the model at as many requests (median): preparing
  the batch and sampling one token a request.

The forward pass itself is not counted, also where it verifies more than one token a request, and
nor is the time that a pass waits for drafts (`wait` in `parts_ms`): that is what speculation buys.
As a check, `whole` compares whole iterations without the forward pass and such waits, with all that
the scheduler does for several tokens a request. Times are wall time of a scheduler that shares its
core with the server's other processes, as a small server does.

    python -m benchmark.bench_overhead

The sidecar is healthy, then stopped (SIGSTOP, from just before the requests come), at last killed.
Last line JSON: `rows`, each with `sidecar`, `running`, `iterations`, `decode_step_ms`,
`added_ms_median`, `added_ms_p99`, `added_share` (median over the decode step; the target is at most
0.03), `whole_ms_median`, `width` and `parts_ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmark.harness.dataset import render
from benchmark.harness.machine import machine, versions
from benchmark.harness.server import Server
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.overhead.iterations import Added, Iteration, PlainDecode, added, plain_decode, read
from benchmark.overhead.probe import FILE_VARIABLE
from benchmark.prompts import PROMPTS
from sglang_qspec.config import parse_cores

SIDECARS = ("healthy", "stopped", "dead")
SHOWN_PARTS = 5


def main() -> None:
    options = _options()
    # As an interrupt: what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from sglang_qspec.models import demo_models

    models = demo_models()
    target, draft = options.model_path or models.target, options.draft_model_path or models.draft
    prompts = render(target, _texts(max(map(_requests, options.running))))
    with tempfile.TemporaryDirectory() as folder:
        with _server(target, [], Path(folder) / "plain", options) as measured:
            plain = {
                running: plain_decode(measured.serve(prompts, running))
                for running in options.running
            }
        speculation = [
            *("--speculative-algorithm", "QSPEC", "--speculative-draft-model-path", str(draft)),
            *("--speculative-qspec-cores", options.sidecar_cores),
        ]
        with _server(target, speculation, Path(folder) / "qspec", options) as measured:
            wait_for_sidecar(measured.server)
            rows = [
                (sidecar, running, added(measured.serve(prompts, running), plain[running]))
                for sidecar, running in _phases(measured, options.running)
            ]
    _report(options, plain, rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model-path", type=Path, help="default: the demo target")
    parser.add_argument("--draft-model-path", type=Path, help="default: the demo draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--cores", default="0", help="of the server")
    parser.add_argument("--sidecar-cores", default="1")
    return parser.parse_args()


def _requests(running: int) -> int:
    """How many requests keep `running` of them served for a while, and others waiting."""
    return max(6, 3 * running) if running < 32 else running * 3 // 2


def _texts(count: int) -> list[str]:
    """Different prompts, so that the sidecar has work with each."""
    return [f"{PROMPTS[i % len(PROMPTS)]} (Variant {i // len(PROMPTS) + 1}.)" for i in range(count)]


class Measured:
    """A server whose scheduler writes down its iterations."""

    def __init__(self, server: Server, path: Path, max_new_tokens: int) -> None:
        self.server = server
        self._path = path
        self._sampling = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        }

    def serve(self, prompts: Sequence[str], running: int) -> list[Iteration]:
        """Serve requests, `running` at a time, and return the iterations with so many."""
        # How many are served at once can be set in a running server through this one setting.
        limit = {"server_args": {"pp_max_micro_batch_size": running}}
        if not all(self.server.post("/set_internal_state", limit)):
            raise RuntimeError(f"the server does not take {limit}")
        texts = prompts[: _requests(running)]
        self._lines()
        began = time.monotonic()
        with ThreadPoolExecutor(len(texts)) as pool:
            list(pool.map(self._ask, texts))
        iterations = [i for i in read(self._lines()) if i.running == running]
        seconds = time.monotonic() - began
        print(
            f"  {running} running: {len(iterations)} iterations, {seconds:.0f} s", file=sys.stderr
        )
        return iterations

    def _ask(self, text: str) -> None:
        self.server.post("/generate", {"text": text, "sampling_params": self._sampling})

    def _lines(self) -> list[str]:
        """What was written since the last call; the scheduler writes once it is idle."""
        time.sleep(1.0)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._path.write_text("")
        return lines


@contextmanager
def _server(
    model: Path, speculation: Sequence[str], path: Path, options: argparse.Namespace
) -> Iterator[Measured]:
    print(f"starting a server: {path.name}", file=sys.stderr)
    server = Server(
        model,
        [
            *("--device", "cpu", "--dtype", options.dtype, "--context-length", "2048"),
            *("--max-running-requests", str(max(options.running)), "--max-total-tokens", "32768"),
            *("--log-level", "warning", "--enable-metrics"),
            *speculation,
        ],
        cores=sorted(parse_cores(options.cores)),
        environment={FILE_VARIABLE: str(path)},
        launcher=("-m", "benchmark.overhead.probe"),
    )
    with server:
        yield Measured(server, path, options.max_new_tokens)


def _phases(measured: Measured, running: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Each state of the sidecar with each number of requests; a dead one stays dead."""
    for count in running:
        yield "healthy", count
    sidecar = _sidecar_process(measured.server)
    for count in running:
        sidecar.send_signal(signal.SIGSTOP)
        yield "stopped", count
        sidecar.send_signal(signal.SIGCONT)
        wait_for_sidecar(measured.server)
    sidecar.kill()
    for count in running:
        yield "dead", count


def _sidecar_process(server: Server) -> psutil.Process:
    (process,) = (p for p in server.processes if "sglang_qspec.sidecar" in " ".join(p.cmdline()))
    return process


def _report(
    options: argparse.Namespace,
    plain: dict[int, PlainDecode],
    rows: Sequence[tuple[str, int, Added]],
) -> None:
    print(f"\n{options.dtype}, cores {options.cores}, sidecar on {options.sidecar_cores}")
    print(
        f"{'sidecar':8} {'running':>7} {'passes':>6} {'width':>5} {'step':>8} {'added':>8} "
        f"{'p99':>8} {'share':>6} {'whole':>8}  parts (means, ms)"
    )
    for sidecar, running, found in rows:
        step = plain[running].step
        parts = ", ".join(
            f"{name} {time:.2f}" for name, time in list(found.parts.items())[:SHOWN_PARTS]
        )
        print(
            f"{sidecar:8} {running:7} {found.iterations:6} {found.width:5.1f} {step:8.2f} "
            f"{found.median:8.3f} {found.p99:8.3f} {found.median / step:6.1%} {found.whole:8.3f}  "
            f"{parts}"
        )
    print("step, added, p99, whole: ms; added and p99 against a plain decode step's own")
    print(json.dumps(_record(plain, rows)))


def _record(
    plain: dict[int, PlainDecode], rows: Sequence[tuple[str, int, Added]]
) -> dict[str, Any]:
    return {
        "rows": [
            {
                "sidecar": sidecar,
                "running": running,
                "iterations": found.iterations,
                "decode_step_ms": round(plain[running].step, 3),
                "added_ms_median": round(found.median, 4),
                "added_ms_p99": round(found.p99, 4),
                "added_share": round(found.median / plain[running].step, 4),
                "whole_ms_median": round(found.whole, 4),
                "width": round(found.width, 2),
                "parts_ms": {name: round(time, 4) for name, time in found.parts.items()},
            }
            for sidecar, running, found in rows
        ],
        "plain": {
            str(running): {
                "iterations": step.iterations,
                "around_model_ms": round(step.around_model, 4),
                "outside_model_ms": round(step.outside_model, 4),
            }
            for running, step in plain.items()
        },
        "command": " ".join(["python -m benchmark.bench_overhead", *sys.argv[1:]]),
        "versions": versions(),
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
