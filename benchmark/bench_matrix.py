"""Measures whether one flag is ever slower: by requests in flight, their arrival, and sampling.

    python -m benchmark.bench_matrix --dataset spec_bench.jsonl --output results

All servers may use all processors. `plain` is SGLang without speculation, `auto` is QSPEC with a
draft model and no other flag, `lookups` is QSPEC without a draft model, and `steps` has step drafts
in every round. The command line can name peers (`bench_peers`), which answer the greedy loads.

A load has so many requests in flight, and one of these arrivals:

- `wave`: all requests come at once to an idle server, and their answers have one length;
- `mixed`: the same with lengths from a quarter to one and three quarters of that length;
- `queue`: three times as many requests come at once, and the rest waits in the server's queue.

Answers are `greedy`, `sampled` (temperature 0.8, top-p 0.95), or greedy `json` by a schema. All
configurations get the same prompts in turn, in an order that reverses from round to round; the
other servers are stopped meanwhile. `--levels 1 16 --arrivals wave --samplings greedy --rounds 1`
takes some minutes. `harness.session` says how a run is resumed and reported. `ratios.svg` shows
tokens per second of `auto` over those of `plain`.

The last line is JSON: `worst_over_plain`, the smallest ratio of `auto` over `plain` in tokens per
second; `worst_over_best`, the smallest ratio over the fastest of `plain`, `lookups` and `steps` at
each load; `over_best_peer_min`, the smallest ratio over the fastest peer; `loads`, these ratios of
each load; and `rows`, whose speedup is over `plain`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.harness.cells import Cell, in_turn
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.dataset import fitting, lengths_of, mixed, of_round, token_ids
from benchmark.harness.options import add_run, parsed, parser_of, positive, settings_of
from benchmark.harness.report import Report, Table, line_figure
from benchmark.harness.run import Answer, Run
from benchmark.harness.server import Server
from benchmark.harness.serving import checked, keep_in_flight, read_answer
from benchmark.harness.session import Session, rounded_up
from benchmark.harness.speculation import await_drafts, update_settings
from benchmark.harness.statistics import Ratio, number, ratio_record
from benchmark.harness.summary import Load, Summary, table
from benchmark.peers.servers import OWN, Programs, add_programs, chosen, programs_of
from benchmark.peers.servers import ask as ask_peer
from benchmark.peers.servers import configuration as peer_configuration

NAME = "bench_matrix"
PLAIN, LOOKUPS, STEPS, AUTO = "plain", "lookups", "steps", "auto"
SGLANG = (PLAIN, LOOKUPS, STEPS, AUTO)
"""Configurations of SGLang; all others are peers."""
QSPEC = ("--speculative-algorithm", "QSPEC")
MEM_FRACTION = 0.08
"""Share of a CPU's memory for the sidecar of a server, which waits beside the others."""
SCHEMA = json.dumps(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "topic": {"type": "string", "maxLength": 24},
                "sentence": {"type": "string", "maxLength": 80},
            },
            "required": ["topic", "sentence"],
        },
        "minItems": 4,
        "maxItems": 8,
    }
)
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    "json": {"temperature": 0.0, "json_schema": SCHEMA},
}
"""Sampling parameters besides the length."""
ARRIVALS = ("wave", "mixed", "queue")
SPREAD = 0.75
"""Largest deviation of a `mixed` answer's length, as a share."""
QUEUE = 3
"""Number of requests of a `queue`, over those in flight."""
WARM_UP_TOKENS = 16
HEADS = ("config", "in flight", "arrival", "sampling", "tokens/s", "speedup", "identical", "others")
NOTE = (
    "speedup: tokens per second over those of SGLang without speculation; identical: share of the "
    "answers that SGLang without speculation gives too, which is not expected of sampled answers; "
    "others: largest share of the processors that other processes took in a round"
)
METHOD = """All servers get the same prompts of a load in turn, in an order that reverses from round
to round; the other servers are stopped meanwhile. Before a load a server answers short prompts, and
idles for some seconds. Tokens per second are those of all answers over the time from the first
arrival to the last answer, prefills included."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    longest = options.longest_prompt + round((1 + SPREAD) * options.max_new_tokens)
    settings = settings_of(options, max(options.levels), rounded_up(longest + 64, 256))
    texts = mixed(fitting(NAME, options.dataset, settings.model, options.longest_prompt)[0])
    prompts = token_ids(settings.model, texts)
    names = ("levels", "arrivals", "samplings", "longest_prompt", "max_new_tokens", "idle")
    shown = {name: getattr(options, name) for name in names}
    session = Session(NAME, options, settings, shown, prompts)
    cells = cells_of(options)
    places = {load: place for place, load in enumerate(dict.fromkeys(c.load for c in cells))}

    def configured(cell: Cell) -> Configuration:
        return configuration(cell.config, settings, options.programs)

    def measure(server: Server, cell: Cell) -> Run:
        in_flight = cell["in_flight"]

        def answer(prompt: Sequence[int], tokens: int) -> Answer:
            return ask(cell, server, prompt, tokens)

        def warm_up() -> None:
            first = [[*prompts[place % len(prompts)]][:32] for place in range(in_flight)]
            keep_in_flight(server, in_flight, answer, first, [WARM_UP_TOKENS] * in_flight)

        if cell.config in SGLANG:
            # The only setting of a running server that limits the running requests.
            update_settings(server, {"pp_max_micro_batch_size": in_flight})
        if configured(cell).has_sidecar:
            await_drafts(server, warm_up)
        warm_up()
        time.sleep(options.idle)
        count = in_flight * (QUEUE if cell["arrival"] == "queue" else 1)
        turn = (cell.round - 1) * len(places) + places[cell.load] + 1
        asked = of_round(prompts, QUEUE * max(options.levels), turn)[:count]
        spread = SPREAD if cell["arrival"] == "mixed" else 0.0
        lengths = lengths_of(asked, options.max_new_tokens, spread)
        # A peer has no queue of its own that could be compared, so its client keeps the rest.
        at_once = count if cell.config in SGLANG else in_flight
        return keep_in_flight(server, at_once, answer, asked, lengths)

    session.serve(cells, configured, measure)
    summary = Summary(session.journal.runs, PLAIN, options.configs)
    return session.finish(report_of(summary), record_of(summary))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All cells; every second round has the reverse order. Peers have the greedy loads only."""
    first = [
        Cell.of(1, config, in_flight=level, arrival=arrival, sampling=sampling)
        for sampling in options.samplings
        for arrival in options.arrivals
        for level in options.levels
        for config in options.configs
        if sampling == "greedy" or config in SGLANG
    ]
    return in_turn(first, options.rounds)


def configuration(name: str, settings: Settings, programs: Programs) -> Configuration:
    """The configuration with this name."""
    if name == PLAIN:
        return Configuration(name, settings, (), settings.all_cores)
    if name == LOOKUPS:
        return Configuration(name, settings, QSPEC, settings.all_cores)
    if name in SGLANG:
        mode = ("--speculative-qspec-mode", "ahead") if name == STEPS else ()
        flags = settings.qspec(*mode, mem_fraction=MEM_FRACTION)
        return Configuration(name, settings, flags, settings.target_cores)
    return peer_configuration(name, settings, programs)


def ask(cell: Cell, server: Server, prompt: Sequence[int], tokens: int) -> Answer:
    """The answer to a prompt of token ids, of `tokens` tokens; JSON may end earlier.

    Raises ServerError or OSError.
    """
    if cell.config not in SGLANG:
        return ask_peer(cell.config, server, prompt, tokens)
    sampling = {**SAMPLINGS[cell["sampling"]], "max_new_tokens": tokens}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    return read_answer(checked(server.post("/generate", body, timeout=3600.0)), 0.0)


def loads_of(summary: Summary) -> list[Load]:
    return [row.load for row in summary.rows if row.config == AUTO]


def over_best(summary: Summary, load: Load, others: Sequence[str]) -> Ratio | None:
    """`auto` over the fastest of the others; None if none of them was served."""
    return Ratio.smallest(summary.ratio(AUTO, other, load) for other in others)


def ratios_of(summary: Summary, load: Load) -> dict[str, Ratio | None]:
    """The ratios of a load, by their name in the line of JSON."""
    peers = [name for name in summary.configs if name not in SGLANG]
    return {
        "over_plain": summary.ratio(AUTO, PLAIN, load),
        "over_best": over_best(summary, load, (PLAIN, LOOKUPS, STEPS)),
        "over_best_peer": over_best(summary, load, peers),
    }


def record_of(summary: Summary) -> dict[str, Any]:
    """For the line of JSON."""
    found = [(load, ratios_of(summary, load)) for load in loads_of(summary)]
    names = {
        "worst_over_plain": "over_plain",
        "worst_over_best": "over_best",
        "over_best_peer_min": "over_best_peer",
    }
    worst: dict[str, Any] = {}
    for name, of in names.items():
        worst |= ratio_record(name, Ratio.smallest(ratios[of] for _, ratios in found))
    loads = []
    for load, ratios in found:
        record = dict(load)
        for name, ratio in ratios.items():
            record |= ratio_record(name, ratio)
        loads.append(record)
    return {**worst, "loads": loads, "rows": [row.record() for row in summary.rows]}


def report_of(summary: Summary) -> Report:
    """A table of ratios, a table of all figures, and a chart of `auto` over `plain`."""
    loads = loads_of(summary)
    columns = {
        "in flight": lambda load: load["in_flight"],
        "arrival": lambda load: load["arrival"],
        "sampling": lambda load: load["sampling"],
        "over plain": lambda load: ratios_of(summary, load)["over_plain"],
        "over best": lambda load: ratios_of(summary, load)["over_best"],
        "over best peer": lambda load: ratios_of(summary, load)["over_best_peer"],
    }
    ratios = Table.of("Tokens per second of auto over those of others", loads, columns)
    figures = table("Servers", summary.rows, HEADS, NOTE)
    worst = Ratio.smallest(summary.ratio(AUTO, PLAIN, load) for load in loads)
    headline = f"QSPEC with one flag over SGLang without speculation, at least: {number(worst)}."
    points = (
        (load["sampling"], load["arrival"], load["in_flight"], ratio.median if ratio else None)
        for load in loads
        for ratio in [summary.ratio(AUTO, PLAIN, load)]
    )
    title, axes = "Speedup by requests in flight", ("requests in flight", "over plain")
    caption = "Tokens per second of `auto` over those of `plain`."
    drawn = line_figure("ratios", title, caption, points, axes, reference=1.0)
    return Report("Never slower", headline, [ratios, figures], METHOD, figures=drawn)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__)
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL with prompts")
    add_programs(parser)
    add("--configs", nargs="+", help="servers to run (default: all that can)")
    levels = "requests in flight (default: 1 2 4 8 16 32 64)"
    add("--levels", nargs="+", type=positive, default=[1, 2, 4, 8, 16, 32, 64], help=levels)
    add("--arrivals", nargs="+", choices=ARRIVALS, default=list(ARRIVALS), help="(default: all)")
    kinds = list(SAMPLINGS)
    add("--samplings", nargs="+", choices=kinds, default=kinds, help="(default: all)")
    add("--longest-prompt", type=positive, default=512, help="in tokens (default: 512)")
    add("--rounds", type=positive, default=3, help="figures are medians over rounds (default: 3)")
    add("--max-new-tokens", type=positive, default=128, help="of an answer (default: 128)")
    add("--idle", type=float, default=3.0, help="seconds before a load (default: 3)")
    add_run(parser, "bfloat16")
    options = parsed(parser, argv)
    if not 0 <= options.idle <= 3600:
        parser.error(f"--idle: {options.idle:g} is not from 0 to 3600")
    # One flag is what is measured, so nothing is pinned unless the command line says so.
    options.unpinned = options.target_cores is None
    options.programs = programs_of(parser, options)
    peers = [name for name in options.programs.names if name not in OWN]
    options.configs = chosen(parser, options.configs, [*SGLANG, *peers])
    options.levels = sorted(set(options.levels))
    return options


if __name__ == "__main__":
    raise SystemExit(main())
