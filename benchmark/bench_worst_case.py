"""Compares QSPEC with no speculation where drafts do not pay, and adaptive with fixed widths.

    python -m benchmark.bench_worst_case --dataset spec_bench.jsonl --output results

A server without speculation and a server with QSPEC have the same core for the target. With
`--unpinned` both may use all cores, and QSPEC divides them as it does by default. They serve cases
that no drafter predicts well, at several numbers of requests in flight: guesses that resemble the
answer and are wrong, a sidecar that drafts wrong tokens, prompts of random tokens at temperature
1.5, and long contexts. With a dataset they also serve Spec-Bench. On Spec-Bench the benchmark
compares QSPEC's adaptive passes with passes of one width, adaptive (`one-width`) and fixed. All
configurations serve a case before the next case, in an order that reverses from round to round. A
ratio is of two runs of one round. Tables have the median over the rounds, with the smallest and the
largest.

`--levels 1 8 --rounds 1 --max-new-tokens 48` without a dataset takes some minutes; the ratios of
one round have no spread. `harness.session` says how a run is resumed and reported. A resumed run
may have other cases, levels, widths and rounds. `speedup.svg` shows QSPEC over no speculation by
requests in flight.

The last line is JSON: `worst_ratio`, the smallest ratio of the adaptive width over no speculation
in tokens per second; `adaptive_over_best_fixed_min`, the smallest ratio of the adaptive width over
the fastest fixed width; and `rows`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmark.harness.cells import Cell
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import fitting, mixed
from benchmark.harness.options import (
    add_run,
    add_unpinned,
    parsed,
    parser_of,
    positive,
    settings_of,
)
from benchmark.harness.session import Session, rounded_up
from benchmark.harness.summary import Summary
from benchmark.worst import wrong_sidecar
from benchmark.worst.cases import BASELINE, BY_NAME, CASES, SPEC_BENCH, cells_of
from benchmark.worst.client import Client, vocab_size_of
from benchmark.worst.loads import Loads
from benchmark.worst.summary import record_of, report_of

NAME = "bench_worst_case"
WIDTH = 16
"""Maximum width of a pass, in tokens of a request."""
SLOTS = 32
TOTAL_TOKENS = 49152
"""KV slots of the target, for short prompts in all request slots, or one long shared prompt."""
LONGEST_PROMPT = 256
"""Maximum tokens of a Spec-Bench prompt."""
MEM_FRACTION = 0.08


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    longest = max(options.context, LONGEST_PROMPT) + options.max_new_tokens + 2 * WIDTH
    settings = settings_of(options, SLOTS, rounded_up(longest, 512), TOTAL_TOKENS)
    prompts: list[str] = []
    if options.dataset is not None:
        prompts = mixed(fitting(NAME, options.dataset, settings.model, LONGEST_PROMPT)[0])
    shown = {"context": options.context, "max_new_tokens": options.max_new_tokens}
    session = Session(NAME, options, settings, shown, prompts, lambda cell: cell.place)
    loads = Loads(settings.model, prompts, options.context, options.max_new_tokens)
    vocab_size = vocab_size_of(settings.model)
    client = Client(vocab_size, WIDTH, ragged=not settings.on_gpu)
    cells = cells_of(options.cases, options.levels, options.widths, options.rounds)
    with ExitStack() as stack:
        endpoint = ""
        if not options.report_only and any(BY_NAME[cell["case"]].misled for cell in cells):
            running = wrong_sidecar.running(settings.model, vocab_size, settings.sidecar_cores)
            endpoint = stack.enter_context(running)
        session.serve(
            cells,
            lambda cell: configuration(cell, settings, endpoint),
            lambda server, cell: client.serve(
                server, cell, loads.of(cell["case"], cell["in_flight"], cell.round)
            ),
        )
    summary = Summary(session.journal.runs, BASELINE)
    return session.finish(report_of(summary), record_of(summary))


def configuration(cell: Cell, settings: Settings, misled: str) -> Configuration:
    """The server of a cell; `misled` is the endpoint of the wrong sidecar."""
    if cell.config == BASELINE:
        return Configuration(BASELINE, settings, (), settings.target_cores)
    widest = ("--speculative-num-draft-tokens", str(WIDTH))
    if BY_NAME[cell["case"]].misled:
        wrong = ("--speculative-algorithm", "QSPEC", "--speculative-qspec-endpoint", misled)
        return Configuration("misled", settings, (*wrong, *widest), settings.target_cores)
    flags = settings.qspec(*widest, mem_fraction=MEM_FRACTION)
    return Configuration("qspec", settings, flags, settings.target_cores)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__, {case.name: case.text for case in CASES})
    add = parser.add_argument
    add("--dataset", type=Path, help="Spec-Bench's questions, or JSONL with `prompt`")
    names = [case.name for case in CASES]
    add("--cases", nargs="+", choices=names, help="(default: all; spec-bench with a dataset)")
    levels = "requests that run at once (default: 1 8 32)"
    add("--levels", nargs="+", type=positive, default=[1, 8, 32], help=levels)
    widths = "fixed widths (default: 2 4 8 16)"
    add("--widths", nargs="*", type=positive, default=[2, 4, 8, 16], help=widths)
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--max-new-tokens", type=positive, default=96, help="output tokens (default: 96)")
    add(
        "--context",
        type=positive,
        default=2560,
        help="tokens of a long prompt, at most those of worst/document.txt (default: 2560)",
    )
    add_run(parser, "bfloat16")
    add_unpinned(parser)
    options = parsed(parser, argv)
    if options.cases is None:
        options.cases = [name for name in names if name != SPEC_BENCH or options.dataset]
    if SPEC_BENCH in options.cases and options.dataset is None:
        parser.error("--cases spec-bench needs a --dataset")
    options.levels, options.widths = sorted(set(options.levels)), sorted(set(options.widths))
    if max(options.levels) > SLOTS:
        parser.error(f"--levels: at most {SLOTS} requests run at once")
    if not all(2 <= width <= WIDTH for width in options.widths):
        parser.error(f"--widths: each must be from 2 to {WIDTH}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
