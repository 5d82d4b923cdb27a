"""Measures the throughput of a server before, during and after faults of its sidecar.

Clients stream requests without a pause to a server without speculation, and to one with QSPEC. The
sidecar of the QSPEC server is healthy until the benchmark

- kills it (SIGKILL); the server starts another one, which has to load its model;
- stops it (SIGSTOP) for some seconds, and continues it;
- slows it: for some seconds it stops and continues the sidecar every 100 ms.

Both servers have the same core for the target. The benchmark measures one server at a time, and
pauses the other. For each fault it reports, in seconds:

- `to_plain_s`: from the fault to the first window of 1 s with the tokens per second of no
  speculation;
- `to_former_s`: from the restart (a new sidecar is ready, the stopped one continues, the slow one
  is healthy) to the first window of 2 s with 90 % of the throughput in the 10 s before the fault.

The last line is JSON: `to_plain_s` and `to_former_s` by fault (medians; null if most repetitions
did not recover in time), `lost_requests`, `changed_outputs`, `plain_tokens_per_s`, `rows` with the
figures of each fault, and `bins`: mean tokens/s in bins of 0.5 s from 2 s before a fault.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmark.harness import charts
from benchmark.harness.configuration import with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.machine import provenance
from benchmark.harness.options import settings_of
from benchmark.harness.output import say, write
from benchmark.harness.report import Figure, Table
from benchmark.harness.server import Server
from benchmark.harness.speculation import sidecar_of, wait_for_sidecar
from benchmark.harness.statistics import rounded
from benchmark.prompts import PROMPTS
from benchmark.soak.recovery import bins, rate, seconds_until
from benchmark.soak.stream import Stream

SLOTS, CLIENTS, MAX_NEW_TOKENS, TOTAL_TOKENS = 2, 6, 128, 16384
STOPPED_S, SLOW_S = 5.0, 8.0
BEFORE_S = 10.0
"""Seconds measured before a fault; their mean throughput is the level before the fault."""
AFTER_S = 10.0
"""Healthy seconds after a fault."""
PLAIN_S = 12.0
"""Seconds of one measurement without speculation."""
FORMER_SHARE = 0.9
LIMIT_S = 10.0
DUTY_S = 0.1
"""A slow sidecar runs for this number of seconds, and is stopped for the same number, in turn."""
BIN_S = 0.5
BINS_FROM_S, BINS_TO_S = -2.0, 18.0
FAULTS = {"kill": "sidecar killed", "stop": "stopped for 5 s", "slow": "slowed for 8 s"}
COLORS = dict(zip(FAULTS.values(), (charts.BLUE, charts.ORANGE, charts.GREEN), strict=True))
HEAD = ("fault", "before", "without", "after", "to plain", "to former")
NOTE = "tokens/s before the fault, while the sidecar is missing or slow, and after; seconds"


class Measured:
    """A server with speculation under load, and the faults of its sidecar."""

    def __init__(self, server: Server, stream: Stream) -> None:
        self._server = server
        self._stream = stream

    def kill(self) -> tuple[float, float]:
        """Kill the sidecar; returns the times of the kill, and of a new sidecar that is ready."""
        process = sidecar_of(self._server)
        lost = time.monotonic()
        process.kill()
        process.wait(10)
        time.sleep(1.0)  # the server notices at its next poll
        wait_for_sidecar(self._server)
        return lost, time.monotonic()

    def stop(self) -> tuple[float, float]:
        """Stop the sidecar for some seconds; returns the times of SIGSTOP and of SIGCONT."""
        process = sidecar_of(self._server)
        lost = time.monotonic()
        process.suspend()
        time.sleep(STOPPED_S)
        process.resume()
        return lost, time.monotonic()

    def slow(self) -> tuple[float, float]:
        """Give the sidecar half of its time for a while; returns the times of begin and end."""
        process = sidecar_of(self._server)
        lost = time.monotonic()
        while time.monotonic() < lost + SLOW_S:
            process.suspend()
            time.sleep(DUTY_S)
            process.resume()
            time.sleep(DUTY_S)
        return lost, time.monotonic()

    def measure(self, fault: Callable[[], tuple[float, float]], plain: float) -> dict[str, Any]:
        """The figures of one fault, with healthy seconds before and after it."""
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


def measure(options: argparse.Namespace) -> int:
    """Measure the faults that the options name; returns the exit code.

    Draws the chart of an earlier run again if the options ask for that alone.
    """
    if options.report_only:
        record = json.loads((options.output / "results.json").read_text(encoding="utf-8"))
        write(options.output, record, figures(record))
        return 0
    settings = settings_of(options, SLOTS, 2048, TOTAL_TOKENS)
    prompts = render(settings.model, PROMPTS)
    plain_server, qspec_server = with_and_without(settings, *options.arguments)
    answers: dict[int, list[int]] = {}
    streams: list[Stream] = []
    rows: list[dict[str, Any]] = []
    plain: list[float] = []

    @contextmanager
    def load(server: Server) -> Iterator[Stream]:
        """The load on one server, while the other one is paused."""
        server.resume()
        sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
        stream = Stream(server, prompts, sampling, CLIENTS, answers)
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
                    measured = Measured(server, stream)
                    for _ in range(options.times):
                        row = measured.measure(getattr(measured, name), statistics.mean(plain))
                        rows.append(row)
                        say(json.dumps({key: row[key] for key in row if key != "bins"}))
    _report(options, plain, rows, streams)
    return 0


def _median(values: Sequence[float | None]) -> float | None:
    """The median, where None (a level was not reached in time) counts as the longest time."""
    known = [float("inf") if value is None else value for value in values]
    middle = statistics.median_low(known)
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
        levels = [f"{statistics.mean(row[key] for row in found):.1f}" for key in keys]
        lines.append([name, *levels, *(str(by_name[name]) for by_name in times.values())])
    title = f"No speculation: {baseline:.1f} tokens/s ({min(plain):.1f} to {max(plain):.1f})"
    print("\n" + Table(title, HEAD, lines, NOTE).text())
    means = {
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
        "bins": rounded(means, 1),
        **provenance(),
    }
    if options.output is not None:
        write(options.output, record, figures(record))
    print(json.dumps(record))


def figures(record: Mapping[str, Any]) -> list[Figure]:
    """Tokens per second around each fault; empty without matplotlib."""
    if not charts.available():
        return []
    lines = {
        FAULTS[fault]: {BINS_FROM_S + BIN_S * (n + 0.5): rate for n, rate in enumerate(rates)}
        for fault, rates in record["bins"].items()
    }
    title = "Throughput through the faults of a sidecar"
    svg = charts.lines(
        {"": lines},
        "seconds after the fault; dashed: no speculation",
        "tokens/s",
        colors=COLORS,
        reference=record["plain_tokens_per_s"],
        marks=[0.0],
        by_number=False,
    )
    return [Figure("faults", title, "", svg)]
