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
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmark.harness.configuration import Configuration, Settings, with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.options import cores, parser_of
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table
from benchmark.harness.server import Server
from benchmark.harness.speculation import sidecar_of, update_settings, wait_for_sidecar
from benchmark.harness.statistics import number, rounded
from benchmark.overhead.iterations import Added, Iteration, PlainDecode, added, plain_decode, read
from benchmark.overhead.probe import FILE_VARIABLE
from benchmark.prompts import PROMPTS

SIDECARS = ("healthy", "stopped", "dead")
SHOWN_PARTS = 5
HEAD = ("sidecar", "running", "passes", "width", "step", "added", "p99", "share", "whole", "parts")
NOTE = """step, added, p99, whole: ms; parts: means in ms; added and p99 are against a plain decode
step. The plain server ran once, before the other, so shares have no spread."""


def main() -> None:
    options = _options()
    # As an interrupt: what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from sglang_qspec.models import demo_models

    models = demo_models()
    target, draft = options.model_path or models.target, options.draft_model_path or models.draft
    settings = Settings(
        *(target, draft, options.dtype, max(options.running), 2048, False),
        *(options.cores, options.sidecar_cores, 32768),
    )
    plain_server, qspec_server = with_and_without(settings)
    prompts = render(target, _texts(max(map(_requests, options.running))))
    with tempfile.TemporaryDirectory() as folder:
        with _server(plain_server, folder, options.max_new_tokens) as measured:
            plain = {
                running: plain_decode(measured.serve(prompts, running))
                for running in options.running
            }
        with _server(qspec_server, folder, options.max_new_tokens) as measured:
            wait_for_sidecar(measured.server)
            rows = [
                (sidecar, running, added(measured.serve(prompts, running), plain[running]))
                for sidecar, running in _phases(measured, options.running)
            ]
    _report(options, plain, rows)


def _options() -> argparse.Namespace:
    parser = parser_of("bench_overhead", __doc__)
    parser.add_argument("--model-path", type=Path, help="default: the demo target")
    parser.add_argument("--draft-model-path", type=Path, help="default: the demo draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--cores", type=cores, default=(0,), help="of the server")
    parser.add_argument("--sidecar-cores", type=cores, default=(1,))
    return parser.parse_args()


def _requests(running: int) -> int:
    """Requests in all, so that `running` of them run for a while and others wait."""
    return max(6, 3 * running) if running < 32 else running * 3 // 2


def _texts(count: int) -> list[str]:
    """Prompts that all differ, so that the sidecar drafts for each."""
    return [f"{PROMPTS[i % len(PROMPTS)]} (Variant {i // len(PROMPTS) + 1}.)" for i in range(count)]


class Measured:
    """A server with a probe in its scheduler, which records iterations."""

    def __init__(self, server: Server, path: Path, max_new_tokens: int) -> None:
        self.server = server
        self._path = path
        self._sampling = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        }

    def serve(self, prompts: Sequence[str], running: int) -> list[Iteration]:
        """Serve requests, `running` at a time; returns the iterations with exactly `running`."""
        # The only setting of a running server that limits the running requests.
        update_settings(self.server, {"pp_max_micro_batch_size": running})
        texts = prompts[: _requests(running)]
        self._lines()
        began = time.monotonic()
        with ThreadPoolExecutor(len(texts)) as pool:
            list(pool.map(self._ask, texts))
        iterations = [i for i in read(self._lines()) if i.running == running]
        seconds = time.monotonic() - began
        say(f"  {running} running: {len(iterations)} iterations, {seconds:.0f} s")
        return iterations

    def _ask(self, text: str) -> None:
        self.server.post("/generate", {"text": text, "sampling_params": self._sampling})

    def _lines(self) -> list[str]:
        """Lines since the last call; the scheduler writes once it is idle."""
        time.sleep(1.0)
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._path.write_text("")
        return lines


@contextmanager
def _server(configuration: Configuration, folder: str, max_new_tokens: int) -> Iterator[Measured]:
    say(f"starting a server: {configuration.name}")
    path = Path(folder) / "iterations.jsonl"
    path.unlink(missing_ok=True)
    probe = ("-m", "benchmark.overhead.probe")
    with configuration.server({FILE_VARIABLE: str(path)}, probe) as server:
        yield Measured(server, path, max_new_tokens)


def _phases(measured: Measured, running: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Each state of the sidecar with each number of requests; a dead one stays dead."""
    for count in running:
        yield "healthy", count
    sidecar = sidecar_of(measured.server)
    for count in running:
        sidecar.send_signal(signal.SIGSTOP)
        yield "stopped", count
        sidecar.send_signal(signal.SIGCONT)
        wait_for_sidecar(measured.server)
    sidecar.kill()
    for count in running:
        yield "dead", count


def _report(
    options: argparse.Namespace,
    plain: dict[int, PlainDecode],
    found: Sequence[tuple[str, int, Added]],
) -> None:
    rows, lines = [], []
    for sidecar, running, one in found:
        row = {
            "sidecar": sidecar,
            "running": running,
            "iterations": one.iterations,
            "decode_step_ms": round(plain[running].step, 3),
            "added_ms_median": one.median,
            "added_ms_p99": one.p99,
            "added_share": one.median / plain[running].step,
            "whole_ms_median": one.whole,
            "width": round(one.width, 2),
            "parts_ms": one.parts,
        }
        rows.append(rounded(row, 4))
        parts = (f"{name} {time:.2f}" for name, time in list(one.parts.items())[:SHOWN_PARTS])
        times = (f"{value:.3f}" for value in (one.median, one.p99))
        lines.append(
            [
                *(sidecar, str(running), str(one.iterations), f"{one.width:.1f}"),
                *(number(row["decode_step_ms"]), *times, f"{row['added_share']:.1%}"),
                *(f"{one.whole:.3f}", ", ".join(parts)),
            ]
        )
    title = f"{options.dtype}, cores {options.cores}, sidecar on {options.sidecar_cores}"
    print("\n" + Table(title, HEAD, lines, NOTE).text())
    steps = {
        str(running): {
            "iterations": step.iterations,
            "around_model_ms": round(step.around_model, 4),
            "outside_model_ms": round(step.outside_model, 4),
        }
        for running, step in plain.items()
    }
    print_record({"rows": rows, "plain": steps})


if __name__ == "__main__":
    main()
