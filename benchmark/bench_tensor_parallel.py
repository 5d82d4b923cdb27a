"""Counts what several ranks of a target send each other, and slows their links.

    python -m benchmark.bench_tensor_parallel --dataset spec_bench.jsonl --ranks 3 --output results

Each output token without speculation costs one round of collective operations: two sums for each
layer, and the logits. A pass that accepts drafts shares its operations among several tokens. The
benchmark counts the operations and bytes of each output token without speculation and with QSPEC,
and measures both servers with some delay added to each operation, as slower links would. The ranks
are processes of this machine. The demo model has 9 heads and 3 KV heads, so it needs 3 ranks. More
ranks than processors compete for them, so the ratio without a delay says little.

`--delays 0 1 --rounds 1 --prompts 4` takes some minutes; the ratios of one round have no spread.
`harness.session` says how a run is resumed and reported. `speedup.svg` shows the ratio by delay.

The last line is JSON: `collectives_per_token` by configuration; `speedup_by_delay_ms`; and `rows`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.harness import charts
from benchmark.harness.cells import Cell, in_turn
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import fitting, mixed, of_round
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.report import Report, line_figure
from benchmark.harness.run import Answer, Run
from benchmark.harness.server import Server
from benchmark.harness.serving import checked, keep_in_flight, read_answer
from benchmark.harness.session import Session, rounded_up
from benchmark.harness.statistics import ratio_record, rounded
from benchmark.harness.summary import Summary, table
from benchmark.tensor_parallel.links import Links

NAME = "bench_tensor_parallel"
NONE, QSPEC = "none", "qspec"
WARM_UP_TOKENS = 16
HEADS = ("delay ms", "config", "tokens/s", "speedup", "collectives/token", "bytes/token")
METHOD = """Both servers answer the same prompts greedily, in turn; the other one is stopped
meanwhile. Each collective operation of the devices' group takes the delay longer on every rank.
Counts are those of rank 0; they include prefills."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    longest = options.longest_prompt + options.max_new_tokens
    settings = settings_of(options, options.in_flight, rounded_up(longest + 64, 256))
    settings = replace(settings, target_cores=(), sidecar_cores=())
    prompts = mixed(fitting(NAME, options.dataset, settings.model, options.longest_prompt)[0])
    names = ("ranks", "prompts", "in_flight", "longest_prompt", "max_new_tokens")
    shown = {name: getattr(options, name) for name in names}
    session = Session(NAME, options, settings, shown, prompts)
    with Links() as links:

        def measure(server: Server, cell: Cell) -> Run:
            asked = of_round(prompts, options.prompts, cell.round)
            links.delay_ms = cell["delay_ms"]
            return serve(server, links, asked, options.in_flight, options.max_new_tokens)

        session.serve(
            cells_of(options.delays, options.rounds),
            lambda cell: configuration(cell.config, settings, options.ranks, links.environment),
            measure,
        )
    summary = Summary(session.journal.runs, NONE, (NONE, QSPEC))
    return session.finish(report_of(summary), record_of(summary))


def cells_of(delays: Sequence[float], rounds: int) -> list[Cell]:
    """All cells; every second round has the reverse order."""
    first = [Cell.of(1, name, delay_ms=delay) for delay in delays for name in (NONE, QSPEC)]
    return in_turn(first, rounds)


def configuration(
    name: str, settings: Settings, ranks: int, environment: Mapping[str, str]
) -> Configuration:
    """A server of several ranks with the plugin; on a CPU the ranks share the CPUs evenly."""
    own = dict(environment)
    if not settings.on_gpu:
        cpus = sorted(os.sched_getaffinity(0))
        groups = [cpus[rank % len(cpus) :: ranks] for rank in range(ranks)]
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, one)) for one in groups)
    flags: tuple[str, ...] = ("--tp-size", str(ranks))
    if name == QSPEC:
        flags = replace(settings, sidecar_cores=()).qspec(*flags)
    return Configuration(name, settings, flags, environment=own)


def serve(server: Server, links: Links, prompts: Sequence[str], in_flight: int, tokens: int) -> Run:
    """Warm up, then answer the prompts greedily. Raises ServerError or OSError."""

    def ask(text: str, length: int) -> Answer:
        sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        body = {"text": text, "sampling_params": sampling}
        return read_answer(checked(server.post("/generate", body)), 0.0)

    first = prompts[:in_flight]
    keep_in_flight(server, in_flight, ask, first, [WARM_UP_TOKENS] * len(first))
    before = links.counts
    run = keep_in_flight(server, in_flight, ask, prompts, [tokens] * len(prompts))
    after = links.counts
    return replace(
        run,
        collectives=after.operations - before.operations,
        collective_bytes=after.size - before.size,
    )


def record_of(summary: Summary) -> dict[str, Any]:
    """For the line of JSON."""
    first = {row.config: row for row in reversed(summary.rows)}
    return {
        "collectives_per_token": {
            name: rounded(row.figures.collectives_per_token, 2) for name, row in first.items()
        },
        "speedup_by_delay_ms": {
            f"{row.load['delay_ms']:g}": ratio_record("speedup", row.speedup)
            for row in summary.rows
            if row.config == QSPEC
        },
        "rows": [row.record() for row in summary.rows],
    }


def report_of(summary: Summary) -> Report:
    """A table, and a chart of the speedup by delay."""
    delays = table("Delays", summary.rows, (*HEADS, "identical"))
    headline = "QSPEC over no speculation, by the delay of each collective operation."
    points = (
        (row.config, row.load["delay_ms"], row.speedup.median)
        for row in summary.rows
        if row.speedup
    )
    caption = "Output tokens per second of QSPEC over those of no speculation."
    axes = ("delay of a collective operation (ms)", "tokens/s over no speculation")
    colors = {QSPEC: charts.COLORS[0]}
    drawn = line_figure("speedup", "Speedup by delay", caption, points, axes, colors=colors)
    return Report("Several ranks with slow links", headline, [delays], METHOD, figures=drawn)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL with prompts")
    add("--ranks", type=positive, default=3, help="tensor-parallel ranks (default: 3)")
    delays = "added to each collective operation, in ms (default: 0 0.2 1 5)"
    add("--delays", nargs="+", type=float, default=[0.0, 0.2, 1.0, 5.0], help=delays)
    add("--prompts", type=positive, default=8, help="prompts of a cell (default: 8)")
    add("--in-flight", type=positive, default=2, help="requests in flight (default: 2)")
    add("--longest-prompt", type=positive, default=128, help="in tokens (default: 128)")
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--max-new-tokens", type=positive, default=64, help="of an answer (default: 64)")
    add_run(parser, "float32")
    options = parsed(parser, argv)
    if options.ranks < 2:
        parser.error(f"--ranks: {options.ranks} is not at least 2")
    if min(options.delays) < 0:
        parser.error(f"--delays: {min(options.delays):g} is below 0")
    options.delays = sorted(set(options.delays))
    return options


if __name__ == "__main__":
    raise SystemExit(main())
