"""Throughput around the faults of a sidecar, under a load that never ends.

Clients stream requests without a pause to a server without speculation, and to one with QSPEC. Its
sidecar is healthy until it is

- killed (SIGKILL); the server starts another, which has to load its model;
- stopped (SIGSTOP) for a while, and goes on;
- slow: stopped and let go on every 100 ms, for a while.

Both servers have the same core for the target, and are measured in turn, while the other one is
paused. For each fault, in seconds:

- `to_plain_s`: from the loss until a window of 1 s has at least the tokens per second of no
  speculation;
- `to_former_s`: from the restart (a new sidecar is ready, the stopped one goes on, the slow one is
  well) until a window of 2 s has at least 90 % of what the same server had in the 10 s before.

    python -m benchmark.bench_faults

Last line JSON: `to_plain_s` and `to_former_s` by fault (medians; null where more than half did not
come back in time), `lost_requests`, `changed_outputs`, `plain_tokens_per_s`, `rows` with each
fault's figures, and `bins`: tokens/s in bins of 0.5 s from 2 s before a fault on, means.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmark.faults.recovery import bins, rate, seconds_until
from benchmark.faults.stream import Stream
from benchmark.harness.configuration import Settings, with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.options import cores, parser_of
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table
from benchmark.harness.server import Server
from benchmark.harness.speculation import sidecar_of, wait_for_sidecar
from benchmark.harness.statistics import rounded
from benchmark.prompts import PROMPTS

BEFORE_S = 10.0
"""Seconds measured before a fault; their mean throughput is the level before the fault."""
AFTER_S = 10.0
"""Healthy seconds after a fault."""
PLAIN_S = 12.0
"""Seconds of one measurement without speculation."""
FORMER_SHARE = 0.9
LIMIT_S = 10.0
DUTY_S = 0.1
"""A slow sidecar runs for this many seconds and is stopped for as many, in turn."""
BIN_S = 0.5
BINS_FROM_S, BINS_TO_S = -2.0, 6.0
HEAD = ("fault", "before", "without", "after", "to plain", "to former")
NOTE = "tokens/s before the fault, while the sidecar is missing or slow, and after; seconds"


class Measured:
    """A server with speculation under load, and the faults of its sidecar."""

    def __init__(self, server: Server, stream: Stream, options: argparse.Namespace) -> None:
        self._server = server
        self._stream = stream
        self._options = options

    def kill(self) -> tuple[float, float]:
        """Kill the sidecar; returns when, and when another one was ready."""
        process = sidecar_of(self._server)
        lost = time.monotonic()
        process.kill()
        process.wait(10)
        time.sleep(1.0)  # the server notices at its next poll
        wait_for_sidecar(self._server)
        return lost, time.monotonic()

    def stop(self) -> tuple[float, float]:
        """Stop the sidecar for a while; returns when it stopped and when it went on."""
        process = sidecar_of(self._server)
        lost = time.monotonic()
        process.suspend()
        time.sleep(self._options.stopped_seconds)
        process.resume()
        return lost, time.monotonic()

    def slow(self) -> tuple[float, float]:
        """Give the sidecar half of its time for a while; returns when that began and ended."""
        process = sidecar_of(self._server)
        lost = time.monotonic()
        while time.monotonic() < lost + self._options.slow_seconds:
            process.suspend()
            time.sleep(DUTY_S)
            process.resume()
            time.sleep(DUTY_S)
        return lost, time.monotonic()

    def measure(self, fault: Callable[[], tuple[float, float]], plain: float) -> dict[str, Any]:
        """One fault, with healthy seconds before and after it."""
        began = time.monotonic()
        time.sleep(BEFORE_S)
        lost, back = fault()
        time.sleep(AFTER_S + LIMIT_S / 2)
        events = list(self._stream.events)
        former = rate(events, began, lost)
        to_former = seconds_until(events, back, FORMER_SHARE * former, 2.0, LIMIT_S)
        return {
            "fault": fault.__name__,
            "former_tokens_per_s": former,
            "to_plain_s": seconds_until(events, lost, plain, 1.0, LIMIT_S),
            "without_tokens_per_s": rate(events, lost + 1.0, back),
            "without_s": back - lost,
            "to_former_s": to_former,
            "after_tokens_per_s": rate(events, back + (to_former or 0.0), back + AFTER_S),
            "bins": bins(events, lost, BINS_FROM_S, BINS_TO_S, BIN_S),
        }


def main() -> None:
    options = _options()
    # As an interrupt: what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from sglang_qspec.models import demo_models

    models = demo_models()
    prompts = render(models.target, PROMPTS)
    settings = Settings(
        *(models.target, models.draft, options.dtype, options.slots, 2048, False),
        *(options.cores, options.sidecar_cores, 16384),
    )
    plain_server, qspec_server = with_and_without(settings, *options.arguments)
    answers: dict[int, list[int]] = {}
    streams: list[Stream] = []
    rows: list[dict[str, Any]] = []
    plain: list[float] = []

    @contextmanager
    def load(server: Server) -> Iterator[Stream]:
        """The load on one server, while the other one is paused."""
        server.resume()
        sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
        stream = Stream(server, prompts, sampling, options.clients, answers)
        streams.append(stream)
        stream.start()
        try:
            time.sleep(3.0)
            yield stream
        finally:
            stream.stop()
            server.pause()

    say("starting two servers, without and with QSPEC")
    with plain_server.server() as without:
        without.pause()
        with qspec_server.server() as server:
            wait_for_sidecar(server)
            server.pause()
            for name in options.faults:
                with load(without) as stream:
                    began = time.monotonic()
                    time.sleep(PLAIN_S)
                    plain.append(rate(list(stream.events), began, began + PLAIN_S))
                say(f"no speculation: {plain[-1]:.1f} tokens/s")
                with load(server) as stream:
                    measured = Measured(server, stream, options)
                    for _ in range(options.times):
                        row = measured.measure(getattr(measured, name), statistics.mean(plain))
                        rows.append(row)
                        say(json.dumps({key: row[key] for key in row if key != "bins"}))
    _report(options, plain, rows, streams)


def _options() -> argparse.Namespace:
    parser = parser_of("bench_faults", __doc__)
    parser.add_argument("--faults", nargs="+", default=["kill", "stop", "slow"])
    parser.add_argument("--times", type=int, default=3, help="repetitions of each fault")
    parser.add_argument("--slots", type=int, default=2, help="requests that run at once")
    parser.add_argument("--clients", type=int, default=6, help="requests that run or wait")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--stopped-seconds", type=float, default=5.0)
    parser.add_argument("--slow-seconds", type=float, default=8.0)
    parser.add_argument("--cores", type=cores, default=(0,), help="of both servers")
    parser.add_argument("--sidecar-cores", type=cores, default=(1,))
    parser.add_argument("arguments", nargs="*", help="more for the QSPEC server alone, after --")
    return parser.parse_args()


def _median(values: Sequence[float | None]) -> float | None:
    """The median; None, for a level that was not reached in time, counts as the longest time."""
    ordered = sorted(float("inf") if value is None else value for value in values)
    middle = ordered[(len(ordered) - 1) // 2]
    return None if middle == float("inf") else round(middle, 3)


def _report(
    options: argparse.Namespace,
    plain: Sequence[float],
    rows: Sequence[dict[str, Any]],
    streams: Sequence[Stream],
) -> None:
    baseline = statistics.mean(plain)
    by_fault = {name: [row for row in rows if row["fault"] == name] for name in options.faults}
    times = {
        key: {name: _median([row[key] for row in found]) for name, found in by_fault.items()}
        for key in ("to_plain_s", "to_former_s")
    }
    lines = []
    for name, found in by_fault.items():
        keys = [f"{level}_tokens_per_s" for level in ("former", "without", "after")]
        levels = [statistics.mean(row[key] for row in found) for key in keys]
        shown = [f"{level:.1f}" for level in levels]
        lines.append([name, *shown, *(str(by_name[name]) for by_name in times.values())])
    title = f"No speculation: {baseline:.1f} tokens/s ({min(plain):.1f} to {max(plain):.1f})"
    print("\n" + Table(title, HEAD, lines, NOTE).text())
    bins = {
        name: [statistics.mean(at) for at in zip(*(row["bins"] for row in found), strict=True)]
        for name, found in by_fault.items()
    }
    short = [{key: value for key, value in row.items() if key != "bins"} for row in rows]
    record = {
        **times,
        "lost_requests": sum(stream.lost for stream in streams),
        "changed_outputs": sum(stream.changed for stream in streams),
        "finished_requests": sum(stream.finished for stream in streams),
        "plain_tokens_per_s": round(baseline, 1),
        "rows": rounded(short, 2),
        "bins": rounded(bins, 1),
    }
    print_record(record)


if __name__ == "__main__":
    main()
