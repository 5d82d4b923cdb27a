"""Measures what a batch costs chats at the same server, and what the batch gets beside them.

    python -m benchmark.bench_batches

A server with priorities serves short chats, which arrive at random (`--rate`), and a batch that
`qspec serve-batches` takes from OpenAI's client. In each round

- `chats` has the chats alone;
- `batch` has the batch alone;
- `both` has the same arrivals beside the batch.

The times to the first token of all rounds count together. A simulation of two days of batches that
need 95 % of the servers shows the share of missed deadlines.

The last line is JSON: `ttft_p99_ratio` and `ttft_p50_ratio`, the time to the first token in `both`
over that in `chats`; `batch_share`, the median of the batch's tokens/s in `both` over those in
`batch`; `missed_deadlines`, of `policy.deadlines` and if batches were served as they came; `rows`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

from benchmark.batches.deadlines import batches, by_deadline, first_come, missed
from benchmark.batches.loads import Service, first_token_times
from benchmark.harness.configuration import Configuration
from benchmark.harness.options import add_servers, parsed, parser_of, positive, rate, settings_of
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table
from benchmark.harness.server import Server
from benchmark.harness.serving import warm_up
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.harness.statistics import percentile
from benchmark.prompts import PROMPTS
from benchmark.queueing.load import arrival_times

PRIORITIES = ("--enable-priority-scheduling", "--default-priority-value", "0")
LINES = 5000
"""Lines of a batch, which does not end while it is measured."""
WARM_UP = 8
"""Chats before the first load."""
SETTLE_S = 4.0
"""Seconds of a batch before it is measured."""
SEEDS = range(4)
"""Seeds of the simulated batches."""
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "round": itemgetter("round"),
    "load": itemgetter("load"),
    "first token, median ms": methodcaller("get", "ttft_p50_ms"),
    "p99 ms": methodcaller("get", "ttft_p99_ms"),
    "batch tokens/s": itemgetter("batch_tokens_per_s"),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = settings_of(options, options.slots, 2048, 16384)
    flags = (*settings.qspec(), *PRIORITIES)
    record: dict[str, Any] = {"name": "bench_batches"}
    with (
        tempfile.TemporaryDirectory() as folder,
        Configuration("QSPEC", settings, flags, settings.target_cores).server() as server,
    ):
        wait_for_sidecar(server)
        warm_up(server, 2 * options.slots, {"temperature": 0})
        service = Service(server.url, Path(folder) / "service")
        try:
            service.start()
            record |= measure(server, service, options)
        finally:
            service.stop()
    say("simulating deadlines")
    record["missed_deadlines"] = {
        "policy": max(missed(batches(seed), by_deadline()) for seed in SEEDS),
        "first_come": round(min(missed(batches(seed), first_come) for seed in SEEDS), 3),
    }
    print(Table.of("loads", record["rows"], COLUMNS).text())
    print_record(record)
    return 0


def measure(server: Server, service: Service, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of both loads."""
    fresh = (f"{PROMPTS[number % len(PROMPTS)]} (Variant {number}.)" for number in count())
    arrivals = [
        when
        for when in arrival_times(round(4 * options.rate * options.seconds), options.rate)
        if when < options.seconds
    ]
    rows, shares = list[dict[str, Any]](), list[float]()
    times: dict[str, list[float]] = {"chats": [], "both": []}

    def measured(number: int, load: str) -> float:
        """Add the row of one load; returns the batch's tokens/s."""
        before, began, found = service.tokens(), time.monotonic(), list[float]()
        if load == "batch":
            time.sleep(options.seconds)
        else:
            prompts = [next(fresh) for _ in arrivals]
            found = first_token_times(server, prompts, arrivals, options.chat_tokens)
            times[load] += found
        tokens_per_s = (service.tokens() - before) / (time.monotonic() - began)
        rows.append(
            {
                "round": number,
                "load": load,
                **({} if load == "batch" else shown(found)),
                "batch_tokens_per_s": round(tokens_per_s, 1),
            }
        )
        say(f"  {rows[-1]}")
        return tokens_per_s

    first_token_times(server, [next(fresh) for _ in range(WARM_UP)], [0.0] * WARM_UP, 16)
    for number in range(1, options.rounds + 1):
        measured(number, "chats")
        batch = service.begin([next(fresh) for _ in range(LINES)], options.max_tokens)
        time.sleep(SETTLE_S)
        alone, beside = measured(number, "batch"), measured(number, "both")
        shares.append(beside / alone)
        service.cancel(batch)
    both, chats = times["both"], times["chats"]
    return {
        "ttft_p99_ratio": round(percentile(both, 0.99) / percentile(chats, 0.99), 3),
        "ttft_p50_ratio": round(statistics.median(both) / statistics.median(chats), 3),
        "batch_share": round(statistics.median(shares), 3),
        "chats": len(chats),
        "rows": rows,
    }


def shown(times: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of times in seconds, in milliseconds."""
    return {
        "ttft_p50_ms": round(1000 * statistics.median(times), 1),
        "ttft_p99_ms": round(1000 * percentile(times, 0.99), 1),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench_batches", __doc__)
    add = parser.add_argument
    add("--rounds", type=positive, default=3, help="rounds of the three loads (default: 3)")
    add("--seconds", type=positive, default=60, help="length of a load (default: 60)")
    add("--rate", type=rate, default=1.0, help="chats that arrive in a second (default: 1)")
    add("--slots", type=positive, default=4, help="running requests of the server (default: 4)")
    add("--chat-tokens", type=positive, default=16, help="answer to a chat (default: 16)")
    add("--max-tokens", type=positive, default=64, help="answer to a line (default: 64)")
    add_servers(parser, "bfloat16")
    return parsed(parser, argv)


if __name__ == "__main__":
    raise SystemExit(main())
