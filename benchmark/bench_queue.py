"""Compares queue speculation with no speculation and n-gram speculation, on a set of prompts.

    python -m benchmark.bench_queue --dataset spec_bench.jsonl --num-prompts 20 --output results

A block is up to `--block` prompts of one group, sent as one queue to a server with few running
slots and an empty cache. All configurations serve a block before the next one, in an order that
reverses from block to block (A B C, C B A), and each is compared with `none` over the same blocks.
One server runs at a time; the others wait stopped if memory holds them. On a CPU the target has one
core and the sidecar another by default; the configurations `...-equal` have both for the target.

Figures are of the blocks that all configurations have served. The benchmark sends a failed request
once more. `harness.session` says how a run is resumed and reported, and what happens to a failed
block.

Prints tables, and writes them to `report.md`, and with charts to `report.html`: match rates,
speedups of requests, the mean speedup by completions, and queue speculation against n-grams of the
prompt. The last line is JSON: `rows`, also with `by_group` and `equal_hardware_speedup`, and the
`equal_hardware_speedup` of `qspec-8`. An equal-hardware speedup is over no speculation on the cores
of target and sidecar; a configuration without a sidecar has both cores in this comparison.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmark.harness.cells import Cell
from benchmark.harness.dataset import fitting, spread
from benchmark.harness.options import EXACT, add_run, parsed, parser_of, positive, rate, settings_of
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import serve, warm_up
from benchmark.harness.session import Session
from benchmark.queueing.charts import charts
from benchmark.queueing.configurations import DESCRIPTIONS, NAMES, configuration
from benchmark.queueing.load import blocks_of, cells_of, send
from benchmark.queueing.report import report_of
from benchmark.queueing.summary import Blocks

NAME = "bench_queue"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = settings_of(options, options.slots, options.context_length)
    limit = options.context_length - options.max_new_tokens - 1
    prompts, too_long = fitting(NAME, options.dataset, settings.model, limit, options.groups)
    chosen = {group: spread(texts, options.num_prompts) for group, texts in prompts.items()}
    blocks = blocks_of(chosen, options.block)
    by_place = {(block.group, block.part): block for block in blocks}
    configs = [name for name in NAMES if name in options.configs]
    limits = (options.max_new_tokens, options.request_rate)
    shown = {"max_new_tokens": options.max_new_tokens, "request_rate": str(options.request_rate)}
    session = Session(NAME, options, settings, shown, blocks)

    def measure(server: Server, cell: Cell) -> Run:
        block = by_place[cell["group"], cell["part"]]
        served = configuration(cell.config, settings)
        return serve(
            server,
            lambda: send(server, served, block.prompts, *limits),
            lambda: warm_up(server, 2 * settings.slots, {"temperature": 0}),
            has_sidecar=served.has_sidecar,
        )

    session.serve(
        cells_of(blocks, configs, options.rounds),
        lambda cell: configuration(cell.config, settings),
        measure,
    )
    served = Blocks(session.journal.runs, [name for name in configs if name not in session.failed])
    return session.finish(
        report_of(served, charts(served)),
        served.record(),
        rounds=options.rounds,
        blocks=f"{served.count} of {options.rounds * len(blocks)} served",
        prompts=dict(Counter(block.group for block in blocks for _ in block.prompts)),
        too_long=too_long,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__, DESCRIPTIONS)
    add = parser.add_argument
    file = "Spec-Bench's questions, or JSONL with `prompt`"
    add("--dataset", type=Path, required=True, help=file)
    add("--groups", nargs="+", help="groups to serve (default: all)")
    add("--num-prompts", type=positive, metavar="N", help="prompts of each group (default: all)")
    add("--configs", nargs="+", choices=NAMES, default=list(NAMES), help="(default: all)")
    add("--rounds", type=positive, default=1, help="rounds over all blocks (default: 1)")
    add("--slots", type=positive, default=2, help="requests that run at once (default: 2)")
    add("--block", type=positive, default=20, help="largest block, in prompts (default: 20)")
    add("--max-new-tokens", type=positive, default=128, help="maximum output (default: 128)")
    add("--context-length", type=positive, default=2048, help="in tokens (default: 2048)")
    add("--request-rate", type=rate, default=math.inf, help="arrivals per second (default: inf)")
    add_run(parser, "float32", EXACT)
    return parsed(parser, argv)


if __name__ == "__main__":
    raise SystemExit(main())
