"""Compares the pipelines `sequential`, `halves` and `ahead`, and the server's own choice.

    python -m benchmark.bench_batch_parallel --dataset spec_bench.jsonl --output results

The target has one core and the sidecar another, as if they were two devices. One server with one
sidecar is set to each pipeline in turn, and to each k (draft tokens of a request in a pass) and
number of requests in flight, so all pipelines have the same drafter. Two servers do not speculate:
`none` runs on the target's core, and `none-equal` on both cores. All configurations serve the same
prompts before the next prompts, in an order that reverses from round to round.

The whole matrix takes some hours; `--k 4 --in-flight 4 --rounds 1 --requests-per-slot 2` takes
minutes. `harness.session` says how a run is resumed and reported, and what happens to a failed
cell; a run may be resumed with other `--k`, `--in-flight`, `--configs` and `--rounds`.

Prints tables, and writes them to `report.md` with figures as SVG
(they need matplotlib, of the extra `bench`). `pipelines.svg` is a timeline of `sequential`,
`ahead` and `halves`. The last line is JSON:

- `rows`, also with `pipeline`, `step_tokens`, `used`, `equal_hardware_speedup` and the inter-token
  latencies; `in_flight` is the number of requests that the pipeline runs at once;
- `paper_ratio`: `halves` with 2m requests in flight over `sequential` with m;
- `same_in_flight_ratio`: the better of `halves` and `ahead` over `sequential`;
- `auto_over_best_min`: the smallest ratio of `auto` over the best of the pipelines;
- `auto_speedup_2`, `_4` and `_8`: `auto` over `none`, by the requests in flight.

The first two ratios are of decoded tokens per second, from the cells with V and D closest to equal,
and have their bounds beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.harness.cells import Cell
from benchmark.harness.configuration import Settings
from benchmark.harness.dataset import fitting, mixed
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import send_batch, serve, warm_up
from benchmark.harness.session import Session, rounded_up
from benchmark.harness.speculation import update_settings
from benchmark.harness.statistics import ratio_record, rounded
from benchmark.harness.summary import DIGITS
from benchmark.parallel import plan
from benchmark.parallel.comparisons import auto_speedups, balanced, compare
from benchmark.parallel.figures import figures
from benchmark.parallel.measures import Results
from benchmark.parallel.plan import NAMES, PIPELINES
from benchmark.parallel.report import report_of

NAME = "bench_batch_parallel"
KS = (1, 2, 4, 8)
LEVELS = (1, 2, 4, 8, 16, 32)
WIDTH = 16
"""Maximum width of a pass, in tokens of a request, unless k needs more."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = server_settings(options)
    limit = options.max_prompt_tokens
    groups, _ = fitting(NAME, options.dataset, settings.model, limit, options.groups)
    prompts = mixed(groups)
    session = Session(NAME, options, settings, shown_of(options), prompts)

    def measured(server: Server, cell: Cell) -> Run:
        chosen = plan.prompts_of(cell, prompts, options.requests_per_slot)
        return measure(server, cell, chosen, options.max_new_tokens)

    rounds = (options.rounds, options.streaming_rounds)
    session.serve(
        plan.cells_of(options.configs, options.k, options.in_flight, *rounds),
        lambda cell: plan.configuration(cell.config, settings, width_of(options)),
        measured,
    )
    results = Results(session.journal.runs)
    comparisons = compare(results)
    report = report_of(results, comparisons, figures(results, comparisons))
    return session.finish(report, record_of(results), prompts=len(prompts))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__, plan.DESCRIPTIONS)
    add = parser.add_argument
    file = "Spec-Bench's questions, or JSONL with `prompt`"
    levels = f"requests that run at once: 1 or even numbers (default: {_list(LEVELS)})"
    streaming = "rounds that measure only inter-token latencies, with one k (default: 1)"
    per_slot = "prompts per request in flight; a cell has at least six (default: 3)"
    add("--dataset", type=Path, required=True, help=file)
    add("--groups", nargs="+", help="groups to serve (default: all)")
    add("--k", nargs="+", type=positive, default=KS, help=f"draft tokens (default: {_list(KS)})")
    add("--in-flight", nargs="+", type=positive, default=LEVELS, help=levels)
    add("--configs", nargs="+", choices=NAMES, default=list(NAMES), help="(default: all)")
    add("--rounds", type=positive, default=2, help="figures are medians (default: 2)")
    add("--streaming-rounds", type=int, default=1, help=streaming)
    add("--requests-per-slot", type=positive, default=3, help=per_slot)
    add("--max-new-tokens", type=positive, default=128, help="output tokens (default: 128)")
    add("--max-prompt-tokens", type=positive, default=256, help="longest prompt (default: 256)")
    add_run(parser, "bfloat16")
    options = parsed(parser, argv)
    if options.streaming_rounds < 0:
        parser.error("--streaming-rounds must be 0 or more")
    odd = [level for level in options.in_flight if level > 1 and level % 2]
    if odd:
        parser.error(f"--in-flight: {odd[0]} requests cannot be split into equal halves")
    options.k, options.in_flight = sorted(set(options.k)), sorted(set(options.in_flight))
    return options


def _list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def server_settings(options: argparse.Namespace) -> Settings:
    """The settings; they are the same for all default values of k and requests in flight."""
    # A pass may reach beyond the last token of an answer.
    longest = options.max_prompt_tokens + options.max_new_tokens + 2 * width_of(options)
    return settings_of(options, max(*LEVELS, *options.in_flight), rounded_up(longest, 64))


def width_of(options: argparse.Namespace) -> int:
    """Maximum width of a pass, in tokens of a request."""
    return max(WIDTH, *(k + 1 for k in options.k))


def shown_of(options: argparse.Namespace) -> dict[str, object]:
    """The options, besides the settings and the prompts, that a resumed run must repeat."""
    names = ("requests_per_slot", "max_new_tokens", "max_prompt_tokens")
    return {**{name: getattr(options, name) for name in names}, "width": width_of(options)}


def measure(server: Server, cell: Cell, prompts: Sequence[str], max_new_tokens: int) -> Run:
    """Set the server to the pipeline of the cell, and serve; errors as in `serving.serve`."""
    running = plan.running(cell.config, cell["in_flight"])
    update_settings(server, {"pp_max_micro_batch_size": running})
    if cell["k"] is not None:
        update_settings(server, PIPELINES[cell.config].runtime(cell["k"]))
    body = plan.body_of(cell, prompts, max_new_tokens)
    return serve(
        server,
        lambda: send_batch(server, body, len(prompts) * max_new_tokens),
        lambda: warm_up(server, running + 2, body["sampling_params"]),
        has_sidecar=cell.config in PIPELINES,
    )


def record_of(results: Results) -> dict[str, Any]:
    """For the line of JSON."""
    comparisons = compare(results)
    record: dict[str, Any] = {"rows": [results.record(row) for row in results.rows]}
    chosen = {"paper": balanced(comparisons.paper), "same_in_flight": balanced(comparisons.best)}
    for name, one in chosen.items():
        record |= ratio_record(f"{name}_ratio", one.ratio if one else None, DIGITS)
        record[f"{name}_bound"] = rounded(one and one.bound, DIGITS)
        record[f"{name}_at"] = one and {"k": one.k, "in_flight": one.in_flight}
    for name, config in (("auto", plan.AUTO), ("auto_step", plan.AUTO_STEP)):
        worst = comparisons.worst_choice(config)
        record |= ratio_record(f"{name}_over_best_min", worst.ratio if worst else None, DIGITS)
    speedups = auto_speedups(results)
    for level in sorted({2, 4, 8, *speedups}):
        speedup, equal = speedups.get(level, (None, None))
        record |= ratio_record(f"auto_speedup_{level}", speedup, DIGITS)
        record |= ratio_record(f"auto_equal_hardware_{level}", equal, DIGITS)
    record["comparisons"] = comparisons.record()
    return record


if __name__ == "__main__":
    raise SystemExit(main())
