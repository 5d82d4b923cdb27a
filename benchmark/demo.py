"""Serves a queue of twelve prompts without speculation and with QSPEC, and compares the times.

Twelve prompts arrive at once at a server with few running slots, so most of them wait. Two servers
run one after the other, with the same settings except for speculation. On a machine with several
cores the target has its own core in both, and the sidecar another. With `--unpinned` both targets
may use all cores, and QSPEC divides them itself.

Prints a table, one answer, and a last line of JSON with `identical`, `speedup` and `accept_len`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

from benchmark.harness.configuration import with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.options import (
    EXACT,
    add_servers,
    add_unpinned,
    parsed,
    positive,
    settings_of,
)
from benchmark.harness.output import say
from benchmark.harness.report import Table
from benchmark.harness.run import Run, pairs
from benchmark.harness.server import Server
from benchmark.harness.serving import read_answer, send_each, warm_up
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.harness.statistics import Ratio, ratio_record
from benchmark.prompts import PROMPTS

TOTAL_TOKENS = 16384


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = settings_of(options, options.slots, 2048, TOTAL_TOKENS)
    prompts = render(settings.model, PROMPTS)
    runs: list[Run] = []
    completions = ("--speculative-qspec-completions", str(options.completions))
    for configuration in with_and_without(settings, *completions, *options.arguments):
        say(f"starting SGLang, {configuration.name}")
        with configuration.server() as server:
            if configuration.has_sidecar:
                wait_for_sidecar(server)
            run, text = serve(server, configuration.name, prompts, options)
            runs.append(run)
    report(runs, text, options)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="demo")
    add = parser.add_argument
    add("--slots", type=positive, default=2, help="requests that run at once (default: 2)")
    add("--max-new-tokens", type=positive, default=128, help="maximum output (default: 128)")
    add("--completions", type=positive, default=8, help="drafted per prompt (default: 8)")
    add("arguments", nargs="*", help="more flags of the QSPEC server, after --")
    add_servers(parser, "float32", EXACT)
    add_unpinned(parser)
    return parsed(parser, argv)


def serve(
    server: Server, name: str, prompts: Sequence[str], options: argparse.Namespace
) -> tuple[Run, str]:
    """Serve all prompts at once; returns the run, and the answer to the first prompt."""
    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
    warm_up(server, 1, sampling)
    server.post("/flush_cache?timeout=10", {})
    began = time.monotonic()
    sent = send_each(server, prompts, sampling, title=name)
    seconds = time.monotonic() - began
    answers = map(read_answer, sent.raw, sent.latencies or ())
    return Run(seconds, tuple(answers)), sent.raw[0]["text"]


def report(runs: Sequence[Run], text: str, options: argparse.Namespace) -> None:
    plain, qspec = runs
    different = [
        place
        for place, (ours, theirs) in enumerate(pairs(qspec, plain))
        if ours.output_ids != theirs.output_ids
    ]
    speedup = Ratio((qspec.tokens_per_s / plain.tokens_per_s,))
    same = "different" if different else "identical"
    columns: dict[str, Callable[[Run], object]] = {
        "": lambda run: "QSPEC" if run is qspec else "no speculation",
        "tokens/s": lambda run: f"{run.tokens_per_s:.1f}",
        "speedup": lambda run: speedup if run is qspec else "",
        "mean latency (s)": lambda run: run.latency_mean,
        "accept length": lambda run: run.accept_len,
        "output": lambda run: same if run is qspec else "",
    }
    print("\n" + Table.of(f"{len(PROMPTS)} prompts", runs, columns).text())
    sources = ", ".join(f"{source} {count}" for source, count in qspec.accepted.items())
    print(f"accepted draft tokens by source: {sources}")
    print(f"\n{PROMPTS[0]}\n> " + text.strip().replace("\n", "\n> ") + "\n")
    record = {
        "identical": not different,
        "different": different,
        **ratio_record("speedup", speedup),
        "accept_len": round(qspec.accept_len, 3),
        "accepted_by_source": dict(qspec.accepted),
        "latency_ratio": round(qspec.latency_mean / plain.latency_mean, 3),
        "tokens_per_s": [round(run.tokens_per_s, 1) for run in runs],
        "slots": options.slots,
        "completions": options.completions,
        "dtype": options.dtype,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    raise SystemExit(main())
