"""Measures the time that QSPEC adds to a scheduler iteration, by state of the sidecar.

A server without speculation and one with QSPEC decode 1, 16 and 64 requests at a time while other
requests wait. Both servers have a stopwatch in the scheduler (`overhead.probe`). The added time is
the time of QSPEC's work in the scheduler's thread, in an iteration that decodes. It is the sum of

- QSPEC's hooks in the scheduler: they poll the link, and follow requests that come and end;
- the worker's call without the target model's forward pass: polling, proposing trees, choosing the
  width, laying the trees out, sampling and accepting, moving KV;

minus the median time that a plain decode step of the same number of requests spends around the
model: preparing the batch and sampling one token per request.

The forward pass does not count, even if it verifies more than one token per request. The wait of a
pass for drafts (`wait` in `parts_ms`) does not count either: accepted tokens pay for both. As a
check, `whole` compares whole iterations without forward pass and waits, so it includes the
scheduler's own work for several tokens per request. Times are wall time of a scheduler that shares
its core with the server's other processes, as in a small server.

    python -m benchmark.bench_overhead

The sidecar is first healthy, then stopped (SIGSTOP, just before the requests come), then killed.
`--host 64` starts no server. It prints the host's time for a pass of 64 requests that have nothing
to draft, beside SGLang without speculation: `extra_host_ms` and the waits (`overhead.host`).
`--sidecar 256` prints the host's time for a draft step of a sidecar over 256 rows, on a stubbed
draft model (`overhead.sidecar`). The goal is at most 0.3 ms for queue drafts.

The last line is JSON: `rows`, each with `sidecar`, `running`, `iterations`, `decode_step_ms`,
`added_ms_median`, `added_ms_p99`, `added_share` (median over the decode step; the goal is at most
0.03), `whole_ms_median`, `width` and `parts_ms`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.harness.configuration import Configuration, Settings, with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.options import add_servers, parsed, parser_of, positive, settings_of
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table
from benchmark.harness.server import Server
from benchmark.harness.serving import send_each
from benchmark.harness.speculation import sidecar_of, update_settings, wait_for_sidecar
from benchmark.harness.statistics import rounded
from benchmark.overhead.host import KINDS, compare
from benchmark.overhead.iterations import Added, Iteration, PlainDecode, added, plain_decode, read
from benchmark.overhead.probe import FILE_VARIABLE
from benchmark.overhead.sidecar import measure
from benchmark.prompts import PROMPTS

TOTAL_TOKENS, MAX_NEW_TOKENS = 32768, 64
SHOWN_PARTS = 5
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "sidecar": lambda row: row["sidecar"],
    "running": lambda row: row["running"],
    "passes": lambda row: row["iterations"],
    "width": lambda row: f"{row['width']:.1f}",
    "step": lambda row: row["decode_step_ms"],
    "added": lambda row: f"{row['added_ms_median']:.3f}",
    "p99": lambda row: f"{row['added_ms_p99']:.3f}",
    "share": lambda row: f"{row['added_share']:.1%}",
    "whole": lambda row: f"{row['whole_ms_median']:.3f}",
    "parts": lambda row: ", ".join(
        f"{name} {time:.2f}" for name, time in list(row["parts_ms"].items())[:SHOWN_PARTS]
    ),
}
HOST_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "server": lambda row: row["server"],
    "host": lambda row: f"{row['host_ms']:.3f}",
    "waits": lambda row: f"{row['waits_per_pass']:.2f}",
    "idle": lambda row: row["idle_waits"],
}
HOST_NOTE = """host: ms for a pass; waits: for each pass; idle: waits while the device has no other
pass to run."""
SIDECAR_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "load": lambda row: row["load"],
    "step": lambda row: f"{row['step_ms']:.3f}",
    "from": lambda row: f"{row['least_ms']:.3f}",
    "to": lambda row: f"{row['most_ms']:.3f}",
    "commits": lambda row: "" if row["commits_ms"] is None else f"{row['commits_ms']:.3f}",
}
SIDECAR_NOTE = """step: ms of the host for a pass of the draft model, the median of rounds that were
between `from` and `to`; commits: ms for the commits of all requests before a step."""
NOTE = """step, added, p99, whole: ms; parts: means in ms; added and p99 are against a plain decode
step. The plain server ran once, before the other, so shares have no spread."""


def main() -> None:
    parser = parser_of("bench_overhead", __doc__)
    add = parser.add_argument
    add(
        "--host",
        type=positive,
        metavar="N",
        help="measure only the host's time for a pass of N requests without drafts, on a stubbed"
        " target beside SGLang without speculation",
    )
    add(
        "--sidecar",
        type=positive,
        metavar="N",
        help="measure only the host's time for a draft step of a sidecar over N rows, on a stubbed"
        " draft model",
    )
    add("--running", type=positive, nargs="+", default=[1, 16, 64], help="requests at a time")
    add_servers(parser, "bfloat16")
    options = parsed(parser, None)
    if options.host:
        record = compare(options.host, {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"})
        servers = [{"server": kind, **record[kind]} for kind in KINDS]
        print(Table.of(f"{options.host} requests", servers, HOST_COLUMNS, HOST_NOTE).text())
        print_record(rounded(record, 4))
        return
    if options.sidecar:
        loads = measure(options.sidecar)
        print(Table.of(f"{options.sidecar} rows", loads, SIDECAR_COLUMNS, SIDECAR_NOTE).text())
        print_record(rounded({"rows": loads}, 4))
        return
    settings = settings_of(options, max(options.running), 2048, TOTAL_TOKENS)
    plain_server, qspec_server = with_and_without(settings)
    prompts = render(settings.model, _texts(max(map(_requests, options.running))))
    with tempfile.TemporaryDirectory() as folder:
        with _server(plain_server, folder) as measured:
            plain = {
                running: plain_decode(measured.serve(prompts, running))
                for running in options.running
            }
        with _server(qspec_server, folder) as measured:
            wait_for_sidecar(measured.server)
            rows = [
                (sidecar, running, added(measured.serve(prompts, running), plain[running]))
                for sidecar, running in _phases(measured.server, options.running)
            ]
    _report(settings, plain, rows)


def _requests(running: int) -> int:
    """The number of requests to send: `running` requests run for some time, and others wait."""
    return max(6, 3 * running) if running < 32 else running * 3 // 2


def _texts(count: int) -> list[str]:
    """Different prompts, so that the sidecar drafts for each prompt."""
    return [f"{PROMPTS[i % len(PROMPTS)]} (Variant {i // len(PROMPTS) + 1}.)" for i in range(count)]


class Measured:
    """A server with a probe in its scheduler, which records iterations."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self._path = path

    def serve(self, prompts: Sequence[str], running: int) -> list[Iteration]:
        """Serve requests, `running` at a time; returns the iterations with exactly `running`."""
        # The only setting of a running server that limits the running requests.
        update_settings(self.server, {"pp_max_micro_batch_size": running})
        self._lines()
        sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
        began = time.monotonic()
        send_each(self.server, prompts[: _requests(running)], sampling)
        iterations = [i for i in read(self._lines()) if i.running == running]
        seconds = time.monotonic() - began
        say(f"  {running} running: {len(iterations)} iterations, {seconds:.0f} s")
        return iterations

    def _lines(self) -> list[str]:
        """The probe's lines since the last call; an idle scheduler writes them."""
        time.sleep(1.0)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._path.write_text("")
        return lines


@contextmanager
def _server(configuration: Configuration, folder: str) -> Iterator[Measured]:
    say(f"starting a server: {configuration.name}")
    path = Path(folder) / "iterations.jsonl"
    path.unlink(missing_ok=True)
    probe = ("-m", "benchmark.overhead.probe")
    with configuration.server({FILE_VARIABLE: str(path)}, probe) as server:
        yield Measured(server, path)


def _phases(server: Server, running: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Each state of the sidecar with each number of requests, the killed sidecar last."""
    for count in running:
        yield "healthy", count
    sidecar = sidecar_of(server)
    for count in running:
        sidecar.suspend()
        yield "stopped", count
        sidecar.resume()
        wait_for_sidecar(server)
    sidecar.kill()
    for count in running:
        yield "dead", count


def _report(
    settings: Settings, plain: dict[int, PlainDecode], found: Sequence[tuple[str, int, Added]]
) -> None:
    rows = [
        {
            "sidecar": sidecar,
            "running": running,
            "decode_step_ms": plain[running].step_ms,
            **asdict(one),
        }
        for sidecar, running, one in found
    ]
    cores = f"cores {settings.target_cores}, sidecar on {settings.sidecar_cores}"
    print("\n" + Table.of(f"{settings.dtype}, {cores}", rows, COLUMNS, NOTE).text())
    steps = {str(running): asdict(step) for running, step in plain.items()}
    print_record(rounded({"rows": rows, "plain": steps}, 4))


if __name__ == "__main__":
    main()
