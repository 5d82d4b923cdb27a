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

The last line is JSON: `collectives_per_token` by configuration; `speedup_by_delay_ms`; and `rows`,
each with `config`, `delay_ms`, `tokens_per_s`, `collectives_per_token`, `bytes_per_token`, `same`
and `speedup`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmark.harness.configuration import facts_of
from benchmark.harness.dataset import fitting, mixed, of_round
from benchmark.harness.journal import digest
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.others import Others
from benchmark.harness.run import Answer, Run
from benchmark.harness.server import Server
from benchmark.harness.serving import checked, read_answer
from benchmark.harness.session import Session, rounded_up
from benchmark.tensor_parallel.cells import Cell, cells_of, configuration
from benchmark.tensor_parallel.links import Links
from benchmark.tensor_parallel.summary import Summary

NAME = "bench_tensor_parallel"
WARM_UP_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    longest = options.longest_prompt + options.max_new_tokens
    settings = settings_of(options, options.in_flight, rounded_up(longest + 64, 256))
    settings = replace(settings, target_cores=(), sidecar_cores=())
    prompts = mixed(fitting(NAME, options.dataset, settings.model, options.longest_prompt)[0])
    names = ("ranks", "prompts", "in_flight", "longest_prompt", "max_new_tokens")
    shown = {name: getattr(options, name) for name in names}
    header = {name: str(value) for name, value in shown.items()} | {"texts": digest(prompts)}
    session = Session(NAME, options, Cell, settings, header)
    with Links() as links:

        def measure(server: Server, cell: Cell) -> Run:
            asked = of_round(prompts, options.prompts, cell.round)
            links.delay_ms = cell.delay_ms
            return serve(server, links, asked, options.in_flight, options.max_new_tokens)

        session.serve(
            cells_of(options.delays, options.rounds),
            lambda cell: configuration(cell, settings, options.ranks, links.environment),
            measure,
        )
    summary = Summary(session.journal.runs)
    report = summary.report(session.failed, facts_of(settings, **shown))
    code = session.finish(report, {**summary.record(), "failed": session.failed})
    return code or int(bool(session.failed))


def serve(server: Server, links: Links, prompts: Sequence[str], in_flight: int, tokens: int) -> Run:
    """Warm up, then answer the prompts greedily. Raises ServerError or OSError."""

    def answer(text: str, length: int = tokens) -> Answer:
        sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        began = time.monotonic()
        raw = checked(server.post("/generate", {"text": text, "sampling_params": sampling}))
        return read_answer(raw, time.monotonic() - began)

    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(lambda text: answer(text, WARM_UP_TOKENS), prompts[:in_flight]))
        before, began, others = links.counts, time.monotonic(), Others(server)
        answers = tuple(pool.map(answer, prompts))
        run = Run(time.monotonic() - began, answers, others.share())
    after = links.counts
    return replace(
        run,
        collectives=after.operations - before.operations,
        collective_bytes=after.size - before.size,
    )


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
