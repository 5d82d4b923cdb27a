"""Searches for wrong answers and leaks under hours of a random load with aborts and faults.

A server with QSPEC, the demo models in float32 and a small KV pool gets a random mix of requests:
all endpoints, greedy and sampled, penalties, several answers, stop strings, right and wrong
guesses, controls, streams, odd names, bad requests, bursts, aborts and clients that hang up. A seed
determines the mix. Meanwhile the benchmark kills and stops the sidecar, changes settings and
flushes the cache. It checks:

- every request that is not aborted on purpose ends with the right status (`failed` if not);
- greedy answers equal the answers of a server without speculation and with the same settings, which
  answers a pool of templates before the load (`changed` if not);
- answers with a `sampling_seed` equal the answers of the same server without drafts, because a
  server without QSPEC ignores the seed on a CPU (`changed` if not);
- after the load the server and the sidecar hold no state of a request, and no process has more open
  files than after the first minute (`leaked` if so).

It measures the growth of memory after a warm-up, in MiB per hour with a 95 % interval, of the
server's processes together and of each long life of the sidecar. The memory of a sidecar on a CPU
also grows while it uses parts of its KV for the first time, up to the share that it may take.

    python -m benchmark.bench_soak --minutes 120 --output results

The folder gets `events.jsonl` (every request, kill, stop and change; a failed request with its
body), `samples.csv` (memory, files and state, each second), `memory.svg`, `results.json` and the
server's log. Exits with 1 if anything failed, changed or leaked.

The last line is JSON: `requests`, `failed`, `changed`, `rss_slope_mib_per_h`, `leaked` by name, and
more.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.harness import charts
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.machine import provenance
from benchmark.harness.options import add_servers, parsed, parser_of, positive, rate, settings_of
from benchmark.harness.output import say, write
from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import state_of, wait_for_sidecar
from benchmark.soak import chart, leaks
from benchmark.soak.answers import Answer
from benchmark.soak.asking import LIMIT_S
from benchmark.soak.disturbance import Changes, Strokes
from benchmark.soak.journal import EVENTS_FILE, Journal
from benchmark.soak.mix import Mix
from benchmark.soak.monitor import COLUMNS, Monitor
from benchmark.soak.references import PLAINLY, gather
from benchmark.soak.summary import server_slopes, sidecar_lives
from benchmark.soak.templates import Template, pool
from benchmark.soak.traffic import Traffic

SLOTS = 8
CONTEXT = 1024
COMMON = (
    *("--chunked-prefill-size", "64"),
    *("--schedule-conservativeness", "0.1"),  # admits more requests than fit into the KV pool
)
"""Flags of both servers."""
POOL = 1024
"""KV slots: too few for 8 of the longer requests, so SGLang retracts some."""
LARGE_POOL = 16384
"""KV slots of the server that gives references, enough for all requests."""
FIRST_S = 60.0
FIRST_SHARE = 0.1
"""Length of the first part of the load, without disturbance; the soak counts open files after it.
"""
LOG_FILE = "server.log"
PROGRESS_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    folder = options.output or Path(tempfile.mkdtemp(prefix="bench_soak_"))
    if (folder / EVENTS_FILE).exists():
        sys.exit(f"bench_soak: error: there is a soak in {folder} already; give another --output")
    settings = settings_of(options, SLOTS, CONTEXT)
    templates = pool(options.templates)
    say(f"asking a server without speculation for references; results go to {folder}")
    plain, qspec = configurations(settings)
    with plain.server() as server:
        references = gather(server, [template for template in templates if template.greedy])
    with qspec.server() as server:
        try:
            wait_for_sidecar(server, leaks.SIDECAR_S)
            seeded = [template for template in templates if not template.greedy]
            references |= gather(server, seeded, PLAINLY)
            with Journal(folder, COLUMNS) as journal:
                soak = Soak(server, templates, references, journal, options)
                soak.run()
        finally:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOG_FILE).write_text(server.log, encoding="utf-8")
    return finish(soak.record(), soak, folder)


def configurations(settings: Settings) -> tuple[Configuration, Configuration]:
    """The server that gives references, and the server of the soak."""
    large, small = (replace(settings, total_tokens=tokens) for tokens in (LARGE_POOL, POOL))
    # QSPEC turns SGLang's overlap scheduler off. With it, penalties count the prompt's last token,
    # and each token of the output one pass late (`cumulate_penalty_output_tokens`).
    plain = (*COMMON, "--disable-overlap-schedule")
    return (
        Configuration("references", large, plain, settings.target_cores),
        Configuration("soak", small, settings.qspec(*COMMON), settings.target_cores),
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench_soak", __doc__)
    add = parser.add_argument
    add("--minutes", type=rate, default=120.0, help="minutes of load (default: 120)")
    add("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    levels = "requests in flight, besides bursts (default: 8 16)"
    names = ("LOW", "HIGH")
    add("--in-flight", type=positive, nargs=2, default=[8, 16], metavar=names, help=levels)
    add("--templates", type=positive, default=60, help="requests with a known answer (default: 60)")
    add("--output", type=Path, help="folder of the results (default: a new temporary folder)")
    add_servers(parser, "float32")
    options = parsed(parser, argv)
    # Only a CPU server has a KV pool of a given size.
    options.cpu = True
    low, high = options.in_flight
    if low > high:
        parser.error(f"--in-flight {low} {high}: LOW must be at most HIGH")
    if options.minutes == float("inf"):
        parser.error("--minutes must be finite")
    return options


class Soak:
    """A soak of a server: the load, the disturbances, and the findings."""

    def __init__(
        self,
        server: Server,
        templates: Sequence[Template],
        references: Mapping[int, Answer],
        journal: Journal,
        options: argparse.Namespace,
    ) -> None:
        self.leaked: dict[str, Any] = {}
        self.interrupted = False
        self.mix = Mix(options.seed, templates, references)
        seconds = options.minutes * 60
        low, high = options.in_flight
        self.traffic = Traffic(server, self.mix, references, (low, high), journal)
        self.monitor = Monitor(server, self.traffic, journal)
        self.strokes = Strokes(server, options.seed + 2, seconds, journal)
        self.changes = Changes(server, options.seed + 3, journal)
        self.began = self.ended = 0.0
        """Begin and end of the load, in seconds on the journal's clock."""
        self._server = server
        self._journal = journal
        self._seconds = seconds
        self._options = options
        self._retracted = 0
        self._state: dict[str, Any] = {}

    def run(self) -> None:
        """Run the load and look for leaks. An interrupt ends it early, and keeps all findings."""
        self.began = self.ended = self._journal.now
        over, monitored = threading.Event(), threading.Event()
        works = (self.strokes.run, self.changes.run, self._progress)
        pool = ThreadPoolExecutor(len(works) + 1)
        watching = pool.submit(self.monitor.run, monitored)
        try:
            files = self._first()
            beside = [pool.submit(work, over) for work in works]
            self.traffic.run(time.monotonic() + self._seconds - (self._journal.now - self.began))
            self.ended = self._journal.now
            over.set()
            for work in beside:
                work.result()
            self._last(files)
            monitored.set()
            watching.result()
        except KeyboardInterrupt:
            self.interrupted = True
            self.ended = self._journal.now
            say("interrupted")
        finally:
            over.set()
            monitored.set()
            # A thread may wait for an answer until the server ends.
            pool.shutdown(wait=False)

    def _first(self) -> dict[str, int]:
        """Run the load without disturbance; returns the number of open files by role at its end."""
        seconds = min(FIRST_S, FIRST_SHARE * self._seconds)
        self.traffic.run(time.monotonic() + seconds)
        if not self.traffic.finish(LIMIT_S):
            self.leaked["unfinished_at_first"] = self.traffic.in_flight
        left = leaks.wait_for_idle(self._server)
        self.leaked |= {f"{name}_at_first": count for name, count in left.items()}
        return leaks.files_of(self._server)

    def _last(self, files: dict[str, int]) -> None:
        """Wait until the load has ended, and look for leaks."""
        say("the load has stopped; waiting for the requests in flight")
        finished = self.traffic.finish(LIMIT_S + 60.0)
        if not finished:
            self.leaked["unfinished"] = self.traffic.in_flight
        if self._server.exit_code() is not None:
            self.leaked["server_ended"] = self._server.exit_code()
            return
        self.leaked |= leaks.find(self._server, files)
        try:
            self._state = state_of(self._server)
            metrics = str(self._server.get("/metrics/"))
        except (ServerError, OSError) as error:
            self.leaked["no_state"] = str(error)[:200]
            return
        if self._state["failed"]:
            self.leaked["speculation_ended_by_an_error"] = 1
        found = re.findall(r"^sglang:num_retracted_requests_total\S* (\S+)", metrics, re.MULTILINE)
        self._retracted = round(sum(map(float, found)))

    def _progress(self, over: threading.Event) -> None:
        while not over.wait(PROGRESS_S):
            minutes = (self._journal.now - self.began) / 60
            ended, counts = dict(self.traffic.ended), dict(self.strokes.counts)
            say(f"{minutes:.0f} min: {ended}, strokes {counts}")

    @property
    def failed(self) -> int:
        return self.traffic.ended["failed"] + self.changes.failed

    def record(self) -> dict[str, Any]:
        """All figures."""
        rows = self.monitor.rows
        slopes = server_slopes(rows, self.began, self.ended)
        rss = slopes["rss"]
        lives = sidecar_lives(rows, self.ended)
        longest = lives[0]["mib_per_h"] if lives else None
        return {
            "requests": sum(self.traffic.ended.values()),
            "failed": self.failed,
            "changed": self.traffic.ended["changed"],
            "rss_slope_mib_per_h": None if rss is None else round(rss.per_hour, 2),
            "leaked": self.leaked,
            "compared": self.traffic.compared,
            "ended": dict(self.traffic.ended),
            "cuts": dict(self.traffic.cuts),
            "kinds": dict(sorted(self.mix.counts.items())),
            "server_slopes_mib_per_h": {
                name: None if found is None else found.record() for name, found in slopes.items()
            },
            "sidecar_slope_mib_per_h": None if longest is None else longest["per_hour"],
            "sidecar_lives": lives,
            "strokes": dict(self.strokes.counts),
            "changes": dict(self.changes.counts),
            "changes_failed": self.changes.failed,
            "sidecar_restarts": self._state.get("sidecar_restarts"),
            "retracted": self._retracted,
            "accepted_tokens": self._state.get("accepted_tokens"),
            "tracebacks_in_log": self._server.log.count("Traceback (most recent call last)"),
            "samples": len(rows),
            "samples_without_state": self.monitor.unanswered,
            "interrupted": self.interrupted,
            "minutes": round((self.ended - self.began) / 60, 2),
            "seed": self._options.seed,
            "in_flight": self._options.in_flight,
            **provenance(),
        }


def finish(record: dict[str, Any], soak: Soak, folder: Path) -> int:
    """Write and print the figures; returns the exit code."""
    drawn = chart.figure(soak.monitor.rows, soak.strokes.kills) if charts.available() else None
    write(folder, record, [drawn] if drawn else [])
    print(f"\n{record['requests']} requests in {record['minutes']} minutes: {record['ended']}")
    print(f"compared with a reference: {record['compared']}; retracted: {record['retracted']}")
    print(f"sidecar: {record['strokes']}, {record['sidecar_restarts']} restarts")
    print("memory, MiB per hour, with 95 % intervals:")
    for name, found in record["server_slopes_mib_per_h"].items():
        print(f"  server, {name}: {_shown(found)}")
    for life in record["sidecar_lives"]:
        print(f"  sidecar, {life['minutes']} minutes of life: {_shown(life['mib_per_h'])}")
    print(f"leaked: {record['leaked'] or 'nothing'}")
    print(json.dumps(record))
    if record["interrupted"]:
        return 130
    return 1 if record["failed"] or record["changed"] or record["leaked"] else 0


def _shown(found: dict[str, float] | None) -> str:
    text = "{per_hour:+.2f} ({low:+.2f} to {high:+.2f})"
    return text.format(**found) if found else "too few samples"


if __name__ == "__main__":
    raise SystemExit(main())
