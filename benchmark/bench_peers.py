"""Compares QSPEC with other servers on the same processors: vLLM, llama.cpp and plain SGLang.

    python -m benchmark.bench_peers --dataset spec_bench.jsonl --vllm vllm/bin/python --output out

All servers answer the same prompts greedily, with the same number of requests in flight. `qspec`
divides the processors by itself, and `qspec-pinned` has one for the target and another one for the
sidecar. The benchmark runs the peers that the command line names: vLLM, with and without its
speculation by n-grams, by an interpreter that has it; llama.cpp by the path of `llama-server` and a
GGUF file of the target. Servers take turns. Each number of requests in flight has prompts of its
own in each round, until the file has no more; a prompt that comes again may be in the cache of
every server. vLLM reads its own environment variables, such as VLLM_CPU_OMP_THREADS_BIND.

Answers have one length. Without speculation all requests of a batch then end in the same pass, and
the next ones share a prefill, which is rare in service. `--spread 0.5` draws lengths from half to
one and a half times that length. At the end of a load fewer requests are in flight, so `--prompts`
should be some times the largest level.

`--levels 8 --rounds 1 --prompts 8` takes some minutes; the ratios of one round have no spread.
`harness.session` says how a run is resumed and reported. `throughput.svg` shows tokens per second
by requests in flight.

The last line is JSON: `over_best_peer_min`, the smallest ratio of `qspec` over the fastest peer in
tokens per second; `over_best_peer`, this ratio by requests in flight; and `rows`, whose speedup is
over SGLang without speculation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.harness import charts
from benchmark.harness.cells import Cell, in_turn
from benchmark.harness.dataset import fitting, lengths_of, mixed, of_round, token_ids
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.report import Report, line_figure
from benchmark.harness.run import Answer, Run
from benchmark.harness.server import Server
from benchmark.harness.serving import keep_in_flight
from benchmark.harness.session import Session, rounded_up
from benchmark.harness.statistics import Ratio, number, ratio_record
from benchmark.harness.summary import Summary, table
from benchmark.peers.servers import (
    NAMES,
    OWN,
    QSPEC,
    SGLANG,
    WIDTH,
    add_programs,
    ask,
    chosen,
    configuration,
    programs_of,
)

NAME = "bench_peers"
WARM_UP_TOKENS = 32
HEADS = ("config", "in flight", "tokens/s", "speedup", "identical", "others")
NOTE = (
    "speedup: tokens per second over those of SGLang without speculation; identical: share of the "
    "answers that SGLang without speculation gives too; others: largest share of the processors "
    "that other processes took in a round"
)
METHOD = """Each round has prompts of its own for each number of requests in flight, until the file
has no more. All servers answer them in turn, in an order that reverses from round to round; the
other servers are stopped meanwhile. Answers are greedy; `spread` is the largest deviation of their
lengths from the average, as a share. bfloat16 kernels differ between servers, so equal answers are
not expected of other projects."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    longest = options.longest_prompt + options.max_new_tokens + 2 * WIDTH
    settings = settings_of(options, max(options.levels), rounded_up(longest, 256))
    texts = mixed(fitting(NAME, options.dataset, settings.model, options.longest_prompt)[0])
    prompts = token_ids(settings.model, texts)
    names = ("levels", "prompts", "longest_prompt", "max_new_tokens", "spread")
    shown = {name: getattr(options, name) for name in names}
    session = Session(NAME, options, settings, shown, prompts)

    def measure(server: Server, cell: Cell) -> Run:
        def answer(prompt: Sequence[int], tokens: int) -> Answer:
            return ask(cell.config, server, prompt, tokens)

        first, asked = prompts_of(cell, prompts, options.levels, options.prompts)
        keep_in_flight(server, len(first), answer, first, [WARM_UP_TOKENS] * len(first))
        lengths = lengths_of(asked, options.max_new_tokens, options.spread)
        return keep_in_flight(server, cell["in_flight"], answer, asked, lengths)

    session.serve(
        cells_of(options.configs, options.levels, options.rounds),
        lambda cell: configuration(cell.config, settings, options.programs),
        measure,
    )
    summary = Summary(session.journal.runs, SGLANG, NAMES)
    return session.finish(report_of(summary), record_of(summary))


def cells_of(configs: Sequence[str], levels: Sequence[int], rounds: int) -> list[Cell]:
    """All cells; every second round has the reverse order."""
    first = [Cell.of(1, config, in_flight=level) for level in levels for config in configs]
    return in_turn(first, rounds)


def over_best_peer(summary: Summary, level: int) -> Ratio | None:
    """QSPEC over the peer with the smallest ratio; None without a peer or common rounds."""
    peers = (name for name in summary.configs if name not in OWN)
    return Ratio.smallest(summary.ratio(QSPEC, name, {"in_flight": level}) for name in peers)


def record_of(summary: Summary) -> dict[str, Any]:
    """For the line of JSON."""
    over = {level: over_best_peer(summary, level) for level in summary.values("in_flight")}
    return {
        **ratio_record("over_best_peer_min", Ratio.smallest(over.values())),
        "over_best_peer": {
            str(level): ratio_record("ratio", ratio) for level, ratio in over.items()
        },
        "rows": [row.record() for row in summary.rows],
    }


def report_of(summary: Summary) -> Report:
    """A table, and a chart of tokens per second by requests in flight."""
    servers = table("Servers", summary.rows, HEADS, NOTE)
    over = (over_best_peer(summary, level) for level in summary.values("in_flight"))
    headline = f"QSPEC over the fastest peer, at least: {number(Ratio.smallest(over))}."
    points = (
        ("", row.config, row.load["in_flight"], row.figures.tokens_per_s) for row in summary.rows
    )
    title, axes = "Throughput by requests in flight", ("requests in flight", "tokens/s")
    caption = "Output tokens per second of each server on the same processors."
    colors = dict(zip(NAMES, charts.COLORS, strict=False))
    drawn = line_figure("throughput", title, caption, points, axes, colors=colors)
    return Report("Throughput beside other servers", headline, [servers], METHOD, figures=drawn)


def prompts_of(
    cell: Cell, prompts: Sequence[list[int]], levels: Sequence[int], count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a cell's warm-up, one for each request in flight, and the measured ones.

    Each level of each round has prompts of its own, until the file has no more.
    """
    each = count + max(levels)
    number = 1 + (cell.round - 1) * len(levels) + list(levels).index(cell["in_flight"])
    found = of_round(prompts, each, number)
    return found[count : count + cell["in_flight"]], found[:count]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL with prompts")
    add_programs(parser)
    add("--configs", nargs="+", help="servers to run (default: all that can)")
    levels = "requests in flight (default: 1 2 4 8 16)"
    add("--levels", nargs="+", type=positive, default=[1, 2, 4, 8, 16], help=levels)
    add("--prompts", type=positive, default=24, help="prompts of a level (default: 24)")
    add("--longest-prompt", type=positive, default=512, help="in tokens (default: 512)")
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--max-new-tokens", type=positive, default=128, help="of an answer (default: 128)")
    spread = "largest deviation of an answer's length, as a share (default: 0)"
    add("--spread", type=float, default=0.0, help=spread)
    add_run(parser, "bfloat16")
    options = parsed(parser, argv)
    if not 0 <= options.spread <= 1:
        parser.error(f"--spread: {options.spread:g} is not from 0 to 1")
    options.programs = programs_of(parser, options)
    options.configs = chosen(parser, options.configs, options.programs.names)
    options.levels = sorted(set(options.levels))
    return options


if __name__ == "__main__":
    raise SystemExit(main())
