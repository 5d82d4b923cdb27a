"""Compares one flag with plain SGLang, with parts of QSPEC, and with other servers: never slower?

    python -m benchmark.bench_peers --dataset spec_bench.jsonl --vllm vllm/bin/python --output out
    python -m benchmark.bench_peers --dataset spec_bench.jsonl --matrix --output out

All servers may use all processors of the machine, except `qspec-pinned`. `qspec` has a draft model
and no other flag, and divides the processors by itself; `qspec-pinned` has one for the target and
another one for the sidecar; `sglang` is SGLang without speculation; `lookups` is QSPEC without a
draft model, and `steps` has step drafts in every round. The command line names the peers that run:
vLLM, with and without its speculation by n-grams, by an interpreter that has it; llama.cpp by the
path of `llama-server` and a GGUF file of the target; OpenVINO GenAI, with and without its lookups,
by an interpreter that has it and the same file. vLLM reads its own environment variables, such as
VLLM_CPU_OMP_THREADS_BIND.

A load is a number of requests in flight (`--levels`), a kind of answers, and an arrival:

- `steady`: `--prompts` requests, of which the next one comes when another one has its answer;
- `wave`: all requests come at once to an idle server, and their answers have one length;
- `mixed`: the same with lengths from a quarter to one and three quarters of that length;
- `queue`: three times as many requests come at once, and the rest waits in the server's queue.

Answers are `greedy`, `sampled` (temperature 0.8, top-p 0.95), or greedy `json` by a schema. The
default is a steady load of greedy answers; `--matrix` has all others for `qspec`, `sglang`,
`lookups` and `steps`, which takes hours on a CPU. Peers have greedy answers only. With answers of
one length and without speculation, all requests of a steady batch end in the same pass, and the
next ones share a prefill, which is rare in service. `--spread 0.5` draws lengths from half to one
and a half times that length. At the end of a load fewer requests are in flight, so `--prompts`
should be some times the largest level.

Each load of a round has prompts of its own, until the file has no more; a prompt that comes again
may be in the cache of every server. `--levels 8 --rounds 1 --prompts 8` takes some minutes; the
ratios of one round have no spread. `harness.session` says how a run is resumed and reported.
`ratios.svg` shows tokens per second of `qspec` over those of `sglang`, and `throughput.svg` those
of all servers under the steady greedy load.

The last line is JSON. The smallest ratios of `qspec` in tokens per second are `worst_over_plain`,
over `sglang`; `worst_over_best`, over the fastest of `sglang`, `lookups` and `steps` at each load;
and `over_best_peer_min`, over the fastest peer. `mean_over_plain` has the geometric mean over all
loads by server and by requests in flight. `loads` has the ratios of each load, and `rows` have
speedups over `sglang`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark.harness import charts
from benchmark.harness.cells import Cell, in_turn
from benchmark.harness.dataset import fitting, lengths_of, mixed, of_round, token_ids
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.report import Report, Table, line_figure
from benchmark.harness.run import Answer, Run
from benchmark.harness.server import Server
from benchmark.harness.serving import keep_in_flight
from benchmark.harness.session import Session, rounded_up
from benchmark.harness.speculation import await_drafts, update_settings
from benchmark.harness.statistics import Ratio, number, ratio_record
from benchmark.harness.summary import Load, Summary, table
from benchmark.peers.servers import (
    LOOKUPS,
    NAMES,
    OWN,
    QSPEC,
    SAMPLINGS,
    SGLANG,
    STEPS,
    Programs,
    ask,
    configuration,
)

NAME = "bench_peers"
MATRIX = (QSPEC, SGLANG, LOOKUPS, STEPS)
"""The configurations of `--matrix`."""
LEVELS, ARRIVALS = (1, 2, 4, 8, 16, 32, 64), ("wave", "mixed", "queue")
"""The loads of `--matrix`."""
STEADY = "steady"
SPREAD = 0.75
"""Largest deviation of a `mixed` answer's length, as a share."""
QUEUE = 3
"""Number of requests of a `queue`, over those in flight."""
WARM_UP_TOKENS = 32
LONGEST_DRAFT = 16
"""Room for the drafts of two passes behind the longest answer, in tokens of a pass."""
HEADS = ("config", "in flight", "arrival", "sampling", "tokens/s", "speedup", "identical", "others")
NOTE = (
    "speedup: tokens per second over those of SGLang without speculation; identical: share of the "
    "answers that SGLang without speculation gives too; others: largest share of the processors "
    "that other processes took in a round"
)
METHOD = """Each round has prompts of its own for each load, until the file has no more. All servers
answer them in turn, in an order that reverses from round to round; the other servers are stopped
meanwhile. Before a load a server answers short prompts and idles for some seconds. `spread` is the
largest deviation of the answers' lengths from the average under a steady load, as a share. bfloat16
kernels differ between servers, so equal answers are not expected of other projects, and never of
sampled answers."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    longest_answer = round((1 + SPREAD) * options.max_new_tokens)
    longest = options.longest_prompt + longest_answer + 2 * LONGEST_DRAFT
    settings = settings_of(options, max(options.levels), rounded_up(longest, 256))
    texts = mixed(fitting(NAME, options.dataset, settings.model, options.longest_prompt)[0])
    prompts = token_ids(settings.model, texts)
    names = ("levels", "arrivals", "samplings", "prompts", "longest_prompt", "max_new_tokens")
    shown = {name: getattr(options, name) for name in (*names, "spread", "idle")}
    session = Session(NAME, options, settings, shown, prompts)
    cells = cells_of(options)
    loads = list(dict.fromkeys(cell.load for cell in cells))

    def measure(server: Server, cell: Cell) -> Run:
        in_flight, kind = cell["in_flight"], cell["sampling"]
        first, asked = prompts_of(cell, prompts, options, loads)

        def answer(prompt: Sequence[int], tokens: int) -> Answer:
            return ask(cell.config, server, prompt, tokens, kind)

        def warm_up() -> None:
            keep_in_flight(server, in_flight, answer, first, [WARM_UP_TOKENS] * len(first))

        if cell.config in OWN:
            # The only setting of a running server that limits the running requests.
            update_settings(server, {"pp_max_micro_batch_size": in_flight})
        if configuration(cell.config, settings, options.programs).has_sidecar:
            await_drafts(server, warm_up)
        warm_up()
        time.sleep(options.idle)
        spread = {STEADY: options.spread, "mixed": SPREAD}.get(cell["arrival"], 0.0)
        lengths = lengths_of(asked, options.max_new_tokens, spread)
        # A peer has no limit that changes, so its client keeps the rest of a queue.
        queued = cell["arrival"] == "queue" and cell.config in OWN
        return keep_in_flight(server, len(asked) if queued else in_flight, answer, asked, lengths)

    session.serve(
        cells, lambda cell: configuration(cell.config, settings, options.programs), measure
    )
    summary = Summary(session.journal.runs, SGLANG, NAMES)
    return session.finish(report_of(summary), record_of(summary))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All cells; every second round has the reverse order. Peers have the greedy loads only."""
    first = [
        Cell.of(1, config, in_flight=level, arrival=arrival, sampling=sampling)
        for sampling in options.samplings
        for arrival in options.arrivals
        for level in options.levels
        for config in options.configs
        if sampling == "greedy" or config in OWN
    ]
    return in_turn(first, options.rounds)


def prompts_of(
    cell: Cell,
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
    loads: Sequence[object],
) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts of a cell's warm-up, one for each request in flight, and the measured ones.

    Each of the `loads` of each round has prompts of its own, until the file has no more.
    """
    in_flight = cell["in_flight"]
    counts = {STEADY: options.prompts, "queue": QUEUE * in_flight}
    count = counts.get(cell["arrival"], in_flight)
    each = max(options.prompts, QUEUE * max(options.levels)) + max(options.levels)
    number = 1 + (cell.round - 1) * len(loads) + loads.index(cell.load)
    found = of_round(prompts, each, number)
    return found[count : count + in_flight], found[:count]


def loads_of(summary: Summary) -> list[Load]:
    """The loads that QSPEC has served."""
    return [row.load for row in summary.rows if row.config == QSPEC]


def ratios_of(summary: Summary, load: Load) -> dict[str, Ratio | None]:
    """QSPEC over the fastest of others, by name in the line of JSON; None if none was served."""
    peers = [name for name in summary.configs if name not in OWN]
    others = {"plain": (SGLANG,), "best": (SGLANG, LOOKUPS, STEPS), "best_peer": peers}
    return {
        f"over_{name}": Ratio.smallest(summary.ratio(QSPEC, each, load) for each in found)
        for name, found in others.items()
    }


def worst(summary: Summary, name: str) -> Ratio | None:
    """The smallest of the ratios of this name."""
    return Ratio.smallest(ratios_of(summary, load)[name] for load in loads_of(summary))


def means_of(summary: Summary, config: str) -> dict[int, float]:
    """Geometric means of the ratios of a server to plain SGLang, by requests in flight."""
    logs: dict[int, list[float]] = {}
    for row in summary.rows:
        ratio = summary.ratio(config, SGLANG, row.load) if row.config == config else None
        if ratio is not None:
            logs.setdefault(row.load["in_flight"], []).append(math.log(ratio.median))
    return {in_flight: round(math.exp(fmean(found)), 3) for in_flight, found in logs.items()}


def record_of(summary: Summary) -> dict[str, Any]:
    """For the line of JSON."""
    loads = []
    for load in loads_of(summary):
        record = dict(load)
        for name, ratio in ratios_of(summary, load).items():
            record |= ratio_record(name, ratio)
        loads.append(record)
    return {
        **ratio_record("worst_over_plain", worst(summary, "over_plain")),
        **ratio_record("worst_over_best", worst(summary, "over_best")),
        **ratio_record("over_best_peer_min", worst(summary, "over_best_peer")),
        "mean_over_plain": {
            config: means_of(summary, config) for config in summary.configs if config != SGLANG
        },
        "loads": loads,
        "rows": [row.record() for row in summary.rows],
    }


def report_of(summary: Summary) -> Report:
    """A table of ratios, one of all figures, and charts by requests in flight."""
    found = [{**load, **ratios_of(summary, load)} for load in loads_of(summary)]
    columns = {
        "in flight": lambda row: row["in_flight"],
        "arrival": lambda row: row["arrival"],
        "sampling": lambda row: row["sampling"],
        "over SGLang": lambda row: row["over_plain"],
        "over SGLang, lookups and steps": lambda row: row["over_best"],
        "over the fastest peer": lambda row: row["over_best_peer"],
    }
    ratios = Table.of("Tokens per second of QSPEC over those of others", found, columns)
    servers = table("Servers", summary.rows, HEADS, NOTE)
    headline = (
        f"QSPEC over SGLang without speculation, at least: {number(worst(summary, 'over_plain'))}; "
        f"over the fastest peer, at least: {number(worst(summary, 'over_best_peer'))}."
    )
    speedups = [
        (row["sampling"], row["arrival"], row["in_flight"], row["over_plain"].median)
        for row in found
        if row["over_plain"] is not None
    ]
    rates = [
        ("", row.config, row.load["in_flight"], row.figures.tokens_per_s)
        for row in summary.rows
        if (row.load["arrival"], row.load["sampling"]) == (STEADY, "greedy")
    ]
    x = "requests in flight"
    title, caption = "Speedup by requests in flight", "QSPEC over SGLang without speculation."
    figures = line_figure("ratios", title, caption, speedups, (x, "speedup"), reference=1.0)
    title, caption = "Throughput by requests in flight", "Output tokens per second of each server."
    colors = dict(zip(NAMES, charts.COLORS * 2, strict=False))
    axes = (x, "tokens/s")
    figures += line_figure("throughput", title, caption, rates, axes, colors=colors)
    return Report(
        "Throughput beside other servers", headline, [ratios, servers], METHOD, figures=figures
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL with prompts")
    add("--vllm", type=Path, help="a Python interpreter that has vLLM")
    add("--llama-server", type=Path, help="llama.cpp's server; needs --gguf")
    add("--openvino", type=Path, help="a Python interpreter that has OpenVINO GenAI; needs --gguf")
    add("--gguf", type=Path, help="the target as a GGUF file, in float16 for OpenVINO")
    add("--gguf-draft", type=Path, help="llama.cpp's draft model as a GGUF file (default: none)")
    add("--matrix", action="store_true", help="all levels, arrivals and samplings but steady loads")
    add("--configs", nargs="+", help="servers to run (default: all that can but lookups and steps)")
    levels = "requests in flight (default: 1 2 4 8 16)"
    add("--levels", nargs="+", type=positive, help=levels)
    add("--arrivals", nargs="+", choices=(STEADY, *ARRIVALS), help="(default: steady)")
    add("--samplings", nargs="+", choices=list(SAMPLINGS), help="(default: greedy)")
    add("--prompts", type=positive, default=24, help="prompts of a steady load (default: 24)")
    add("--longest-prompt", type=positive, default=512, help="in tokens (default: 512)")
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--max-new-tokens", type=positive, default=128, help="of an answer (default: 128)")
    spread = "largest deviation of an answer's length under a steady load, as a share (default: 0)"
    add("--spread", type=float, default=0.0, help=spread)
    add("--idle", type=float, default=3.0, help="seconds before a load (default: 3)")
    add_run(parser, "bfloat16")
    options = parsed(parser, argv)
    if (options.llama_server or options.openvino) and options.gguf is None:
        parser.error("--llama-server and --openvino need --gguf")
    for name, most in (("spread", 1), ("idle", 3600)):
        if not 0 <= getattr(options, name) <= most:
            parser.error(f"--{name}: {getattr(options, name):g} is not from 0 to {most}")
    programs = Programs(
        options.vllm, options.llama_server, options.openvino, options.gguf, options.gguf_draft
    )
    unknown = sorted(set(options.configs or ()) - set(programs.names))
    if unknown:
        choices = ", ".join(programs.names)
        parser.error(f"--configs: {unknown[0]!r} cannot run; those that can: {choices}")
    matrix = options.matrix
    options.programs = programs
    served = [name for name in programs.names if name not in (LOOKUPS, STEPS)]
    options.configs = options.configs or (MATRIX if matrix else served)
    options.levels = sorted(set(options.levels or (LEVELS if matrix else LEVELS[:5])))
    options.arrivals = options.arrivals or (ARRIVALS if matrix else (STEADY,))
    options.samplings = options.samplings or (tuple(SAMPLINGS) if matrix else ("greedy",))
    return options


if __name__ == "__main__":
    raise SystemExit(main())
