"""Hours of a random load with aborts, odd requests and a sidecar that dies: what breaks or leaks?

A server with QSPEC, the demo models in float32 and a small KV pool, gets a mix of requests that is
drawn with a seed: all endpoints, greedy and sampled, penalties, several answers, stop strings,
right and wrong guesses, controls, streams, odd names, bad requests, bursts, aborts and clients that
hang up. Meanwhile the sidecar is killed and stopped, and settings are changed and the cache is
flushed. What it checks:

- every request that is not aborted on purpose ends with the right status (`failed` if not);
- greedy answers equal those of a server without speculation and of the same settings, which answers
  a pool of templates before; answers of a `sampling_seed`, which a server without QSPEC ignores on
  a CPU, equal those of the same server decoding them without drafts (`changed` if not);
- once the load has stopped, nothing is left of any request, and no process has more open files than
  after the first minute (`leaked` if so);
- memory after a warm-up, in MiB per hour with a 95 % interval, of the server's processes together
  and of each long life of the sidecar.

    python -m benchmark.bench_soak --minutes 120 --output results

The folder gets `events.jsonl` (every request, kill, stop and change; what failed with all of its
body), `samples.csv` (memory, files and state, each second), `memory.png`, `results.json` and the
server's log. Exits with 1 if anything failed, was changed or leaked.

Last line JSON: `requests`, `failed`, `changed`, `rss_slope_mib_per_h`, `leaked` by name, and more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
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
from benchmark.harness.options import cores, parser_of, positive, rate, split_cores
from benchmark.harness.output import say
from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import state_of, wait_for_sidecar
from benchmark.soak import chart, leaks
from benchmark.soak.answers import Answer
from benchmark.soak.asking import LIMIT_S
from benchmark.soak.disturbance import Changes, Strokes
from benchmark.soak.journal import EVENTS_FILE, Journal
from benchmark.soak.load import Load
from benchmark.soak.mix import Mix
from benchmark.soak.monitor import COLUMNS, Monitor
from benchmark.soak.references import PLAINLY, gather
from benchmark.soak.summary import server_slopes, sidecar_lives, warm_up
from benchmark.soak.templates import Template, pool

SLOTS = 8
CONTEXT = 1024
COMMON = (
    *("--chunked-prefill-size", "64"),
    *("--schedule-conservativeness", "0.1"),  # admits more than the KV pool has room for
)
"""Flags of both servers."""
POOL = 1024
"""KV slots: fewer than 8 of the longer requests take, so that requests are retracted."""
LARGE_POOL = 16384
"""KV slots of the server that gives references, which retracts no request."""
FIRST_S = 60.0
FIRST_SHARE = 0.1
"""The first part of the load leaves the sidecar alone; open files are counted after it."""
LOG_FILE = "server.log"
PROGRESS_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # As an interrupt: what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = options.output or Path(tempfile.mkdtemp(prefix="bench_soak_"))
    if (folder / EVENTS_FILE).exists():
        sys.exit(f"bench_soak: error: there is a soak in {folder} already; give another --output")
    from sglang_qspec.models import demo_models

    say("preparing the demo models (a minute the first time)")
    models = demo_models()
    templates = pool(options.templates)
    say(f"asking a server without speculation for references; results go to {folder}")
    settings = Settings(
        *(models.target, models.draft, "float32", SLOTS, CONTEXT, False),
        *(options.cores, options.sidecar_cores),
    )
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
    """The server that gives references, and the one of the soak."""
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
    add("--minutes", type=rate, default=120.0, help="of load (default: 120)")
    add("--seed", type=int, default=0, help="of the mix and of all that is done (default: 0)")
    add(
        "--in-flight",
        type=positive,
        nargs=2,
        default=[8, 16],
        metavar=("LOW", "HIGH"),
        help="requests at a time, besides bursts of more (default: 8 16)",
    )
    add("--templates", type=positive, default=60, help="requests with a known answer (default: 60)")
    first, second = split_cores(False)
    add("--cores", type=cores, default=first, help="of both servers (default: the first)")
    add("--sidecar-cores", type=cores, default=second, help="(default: the second)")
    add("--output", type=Path, help="folder of the results (default: a new temporary folder)")
    options = parser.parse_args(argv)
    low, high = options.in_flight
    if low > high:
        parser.error(f"--in-flight {low} {high}: LOW must be at most HIGH")
    if options.minutes == float("inf"):
        parser.error("--minutes must be finite")
    if not options.sidecar_cores:
        options.sidecar_cores = options.cores = tuple(sorted(os.sched_getaffinity(0)))
    return options


class Soak:
    """One soak of a server: what runs, and what was found."""

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
        self.load = Load(server, self.mix, references, (low, high), journal)
        self.monitor = Monitor(server, self.load, journal)
        self.strokes = Strokes(server, options.seed + 2, seconds, journal)
        self.changes = Changes(server, options.seed + 3, journal)
        self.began = self.ended = 0.0
        """Begin and end of the load, in seconds since the journal was opened."""
        self._server = server
        self._journal = journal
        self._seconds = seconds
        self._options = options
        self._retracted = 0
        self._state: dict[str, Any] = {}

    def run(self) -> None:
        """The load, and the search for leaks. An interrupt ends it early, with what it has."""
        self.began = self.ended = self._journal.now
        over, monitored = threading.Event(), threading.Event()
        works = (self.strokes.run, self.changes.run, self._progress)
        pool = ThreadPoolExecutor(len(works) + 1)
        watching = pool.submit(self.monitor.run, monitored)
        try:
            files = self._first()
            beside = [pool.submit(work, over) for work in works]
            self.load.run(time.monotonic() + self._seconds - (self._journal.now - self.began))
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
            # Some may wait for an answer until the server is ended.
            pool.shutdown(wait=False)

    def _first(self) -> dict[str, int]:
        """Load without disturbance; returns open files by role after it."""
        seconds = min(FIRST_S, FIRST_SHARE * self._seconds)
        self.load.run(time.monotonic() + seconds)
        if not self.load.finish(LIMIT_S):
            self.leaked["unfinished_at_first"] = self.load.in_flight
        left = leaks.wait_for_idle(self._server)
        self.leaked |= {f"{name}_at_first": count for name, count in left.items()}
        return leaks.files_of(self._server)

    def _last(self, files: dict[str, int]) -> None:
        """Wait for the load's end, and look for what is left of it."""
        say("the load has stopped; waiting for what is in flight")
        finished = self.load.finish(LIMIT_S + 60.0)
        if not finished:
            self.leaked["unfinished"] = self.load.in_flight
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
            say(f"{minutes:.0f} min: {dict(self.load.ended)}, strokes {dict(self.strokes.counts)}")

    @property
    def failed(self) -> int:
        return self.load.ended["failed"] + self.changes.failed

    def record(self) -> dict[str, Any]:
        """All figures."""
        rows = self.monitor.rows
        slopes = server_slopes(rows, self.began, self.ended)
        rss = slopes["rss"]
        lives = sidecar_lives(rows, self.ended)
        longest = lives[0]["mib_per_h"] if lives else None
        return {
            "requests": sum(self.load.ended.values()),
            "failed": self.failed,
            "changed": self.load.ended["changed"],
            "rss_slope_mib_per_h": None if rss is None else round(rss.per_hour, 2),
            "leaked": self.leaked,
            "compared": self.load.compared,
            "ended": dict(self.load.ended),
            "cuts": dict(self.load.cuts),
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
    (folder / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    if charts.available():
        kills = soak.strokes.kills
        begin = soak.began + warm_up(soak.ended - soak.began)
        chart.draw(soak.monitor.rows, kills, begin, folder / "memory.png")
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
    if found is None:
        return "too few samples"
    return f"{found['per_hour']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
