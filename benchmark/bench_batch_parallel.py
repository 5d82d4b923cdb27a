"""Batch-parallel speculation: drafting in sequence, in halves, ahead, and what the server chooses.

    python -m benchmark.bench_batch_parallel --dataset spec_bench.jsonl --output results

The target has one core and the drafter another, as two devices. One server with one sidecar is set
to each pipeline in turn, and to each k (draft tokens of a request in a pass) and number of requests
in flight, so that all have the very same drafter; no speculation is served on the target's core
(`none`) and on both (`none-equal`). All configurations serve the same prompts one after another,
in an order that turns around from round to round.

The whole matrix takes some hours; `--k 4 --in-flight 4 --rounds 1 --requests-per-slot 2` takes
minutes. What was measured is written to `runs.jsonl` in the output folder cell by cell: after a cut
the same command with `--resume` goes on, also with other `--k`, `--in-flight`, `--configs` and
`--rounds`, and with `--report-only` it reports what is there. A cell that fails is served once more
by a new server; then its configuration is left out.

Prints tables and whether the targets are met, writes them as Markdown, and PNGs and a report as one
HTML file (figures need matplotlib, of the extra `bench`), and ends with a line of JSON: `rows`,
each with `pipeline`, `k`, `in_flight`, `tokens_per_s`, `hidden_share` and more; `paper_ratio`
(`halves` with 2m requests in flight over `sequential` with m) and `same_in_flight_ratio` (the
better of `halves` and `ahead` over `sequential`), both where V and D are closest, by decoded
tokens per second, with their bounds; `auto_over_best_min`; `auto_speedup_2`, `_4` and `_8`, over
`none` by the requests in flight.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from benchmark.harness import charts, dataset
from benchmark.harness.configuration import Settings
from benchmark.harness.dataset import render
from benchmark.harness.fleet import Fleet
from benchmark.harness.journal import JournalError
from benchmark.harness.machine import machine, versions
from benchmark.harness.options import Hardware, add_output, add_servers, check, positive
from benchmark.harness.output import say
from benchmark.harness.report import Figure
from benchmark.parallel.comparisons import auto_speedups, balanced, compare
from benchmark.parallel.figures import figures
from benchmark.parallel.journal import Journal
from benchmark.parallel.measures import Results, rounded
from benchmark.parallel.plan import (
    AUTO,
    AUTO_STEP,
    DESCRIPTIONS,
    NAMES,
    blocks_of,
    mixed,
)
from benchmark.parallel.report import Report, markdown, page, table
from benchmark.parallel.run import Run, Step, steps_of
from benchmark.parallel.targets import targets

KS = (1, 2, 4, 8)
LEVELS = (1, 2, 4, 8, 16, 32)
WIDTH = 16
"""Of the widest pass that the server can be set to, in tokens of a request, unless k needs more."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    # As an interrupt: servers are ended and what was measured is reported.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not charts.available():
        say(f"there will be no figures, since matplotlib is missing: {charts.INSTALL}")
    try:
        groups = dataset.by_group(dataset.load(options.dataset), options.groups)
    except dataset.DatasetError as error:
        sys.exit(f"bench_batch_parallel: error: {error}")
    settings = settings_of(options)
    prompts = prompts_for(groups, settings, options.max_prompt_tokens)
    folder = options.output or Path(tempfile.mkdtemp(prefix="bench_batch_parallel_"))
    try:
        resumed = options.resume or options.report_only
        journal = Journal.open(folder, header_of(settings, prompts, options), resumed)
    except JournalError as error:
        sys.exit(f"bench_batch_parallel: error: {error}")
    say(f"results go to {folder}")
    run = Run(settings, width_of(options), plan_of(prompts, options), journal)
    interrupted = False
    if not options.report_only:
        memory = None if settings.on_gpu else options.free_gib * 2**30
        try:
            with Fleet(memory) as fleet:
                run.serve(fleet)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted; --resume goes on with this run")
    facts = facts_of(settings, options, len(prompts))
    finish(Results(journal.entries), run.failed, facts, folder)
    return 130 if interrupted else 0 if journal.entries else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        prog="python -m benchmark.bench_batch_parallel",
        epilog="configurations: "
        + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()),
    )
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL of `prompt`")
    add("--groups", nargs="+", help="of the prompts to serve (default: all)")
    add("--k", nargs="+", type=positive, default=list(KS), help=f"(default: {_list(KS)})")
    add(
        "--in-flight",
        nargs="+",
        type=positive,
        default=list(LEVELS),
        help=f"requests that run at once: 1, or an even number (default: {_list(LEVELS)})",
    )
    add("--configs", nargs="+", choices=NAMES, default=list(NAMES), help="(default: all)")
    add("--rounds", type=positive, default=2, help="over all cells; medians (default: 2)")
    add(
        "--streaming-rounds",
        type=int,
        default=1,
        help="over one k, with one request for each in flight, for inter-token latencies; their "
        "tokens per second do not count (default: 1)",
    )
    add(
        "--requests-per-slot",
        type=positive,
        default=3,
        help="prompts of a cell for each request in flight; at least six in all (default: 3)",
    )
    add("--max-new-tokens", type=positive, default=128, help="of each answer (default: 128)")
    add("--max-prompt-tokens", type=positive, default=256, help="of each prompt (default: 256)")
    add("--dtype", default="bfloat16", help="of the target (default: bfloat16)")
    add_servers(parser)
    add_output(parser)
    options = parser.parse_args(argv)
    check(parser, options)
    if options.streaming_rounds < 0:
        parser.error("--streaming-rounds must be 0 or more")
    odd = [level for level in options.in_flight if level > 1 and level % 2]
    if odd:
        parser.error(f"--in-flight: {odd[0]} requests have no two halves of one size")
    options.k, options.in_flight = sorted(set(options.k)), sorted(set(options.in_flight))
    return options


def _list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def settings_of(options: argparse.Namespace) -> Settings:
    """Of all servers; not of the k and the requests in flight, so a run may go on with others."""
    found = Hardware.of(options)
    # A pass may reach beyond the last token of an answer.
    longest = options.max_prompt_tokens + options.max_new_tokens + 2 * width_of(options)
    slots = max(*LEVELS, *options.in_flight)
    return Settings(
        found.model,
        found.draft_model,
        options.dtype,
        slots,
        -(-longest // 64) * 64,
        found.on_gpu,
        found.target_cores,
        found.sidecar_cores,
    )


def width_of(options: argparse.Namespace) -> int:
    """Of the widest pass that the server can be set to, in tokens of a request."""
    widths: list[int] = [WIDTH, *(k + 1 for k in options.k)]
    return max(widths)


def prompts_for(
    groups: Mapping[str, Sequence[dataset.Prompt]], settings: Settings, limit: int
) -> list[str]:
    """Of all groups in turn, in the chat template, those of at most `limit` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    fitting: dict[str, list[str]] = {}
    for group, members in groups.items():
        texts = render(settings.model, [prompt.text for prompt in members])
        fitting[group] = [text for text in texts if len(tokenizer(text).input_ids) <= limit]
        say(f"{group}: {len(fitting[group])} of {len(texts)} prompts are short enough")
    prompts = mixed(fitting)
    if not prompts:
        sys.exit(f"bench_batch_parallel: error: no prompt has at most {limit} tokens")
    return prompts


def plan_of(prompts: Sequence[str], options: argparse.Namespace) -> list[Step]:
    """All cells, in the order in which they are served."""
    blocks = blocks_of(
        options.configs, options.k, options.in_flight, options.rounds, options.streaming_rounds
    )
    return steps_of(blocks, prompts, options.requests_per_slot, options.max_new_tokens)


def header_of(
    settings: Settings, prompts: Sequence[str], options: argparse.Namespace
) -> dict[str, str]:
    """What must be the same for a run to be resumed."""
    return {
        "prompts": hashlib.sha256(msgspec.json.encode(list(prompts))).hexdigest(),
        "requests_per_slot": str(options.requests_per_slot),
        "max_new_tokens": str(options.max_new_tokens),
        "width": str(width_of(options)),
        **{name: str(value) for name, value in asdict(settings).items()},
        **versions(),
        "machine": machine(),
    }


def facts_of(settings: Settings, options: argparse.Namespace, prompts: int) -> dict[str, Any]:
    """What was run and where."""
    return {
        "command": shlex.join(sys.orig_argv),
        "machine": machine(),
        "versions": versions(),
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "max_new_tokens": options.max_new_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
        "requests_per_slot": options.requests_per_slot,
        "prompts": prompts,
    }


def finish(
    results: Results, failed: Mapping[str, str], facts: Mapping[str, Any], folder: Path
) -> None:
    """Write the report and its figures, print the tables and the line of JSON."""
    comparisons = compare(results)
    report = Report(results.rows(), comparisons, targets(results, comparisons), failed)
    shown = {name: v if isinstance(v, str) else json.dumps(v) for name, v in facts.items()}
    drawn = figures(results, comparisons)
    for figure in drawn:
        _write(figure, folder)
    file = folder / "report.html"
    file.write_text(page(report, drawn, shown), encoding="utf-8")
    (folder / "tables.md").write_text(markdown(report), encoding="utf-8")
    print("\n" + table(report))
    print(f"\nreport: {file}; figures beside it: {sum(f.png is not None for f in drawn)}")
    if not charts.available():
        print(f"figures need matplotlib: {charts.INSTALL}, then --report-only")
    record = {**record_of(results, report), **facts}
    (folder / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(json.dumps(record))


def record_of(results: Results, report: Report) -> dict[str, Any]:
    """For the line of JSON."""
    comparisons = report.comparisons
    record: dict[str, Any] = {"rows": [row.record() for row in report.rows]}
    chosen = {"paper": balanced(comparisons.paper), "same_in_flight": balanced(comparisons.best)}
    for name, one in chosen.items():
        record[f"{name}_ratio"] = None if one is None else rounded(one.ratio)
        record[f"{name}_bound"] = None if one is None else rounded(one.bound)
        record[f"{name}_at"] = None if one is None else {"k": one.k, "in_flight": one.in_flight}
    for name, config in (("auto", AUTO), ("auto_step", AUTO_STEP)):
        worst = comparisons.worst_choice(config)
        record[f"{name}_over_best_min"] = None if worst is None else rounded(worst.ratio)
    speedups = auto_speedups(results)
    for level in sorted({2, 4, 8, *speedups}):
        found = speedups.get(level)
        record[f"auto_speedup_{level}"] = None if found is None else rounded(found[0])
        record[f"auto_equal_hardware_{level}"] = None if found is None else rounded(found[1])
    record["comparisons"] = comparisons.record()
    record["targets"] = [one.record() for one in report.targets]
    record["failed"] = dict(report.failed)
    return record


def _write(figure: Figure, folder: Path) -> None:
    if figure.png is not None:
        (folder / f"{figure.name}.png").write_bytes(figure.png)


if __name__ == "__main__":
    raise SystemExit(main())
