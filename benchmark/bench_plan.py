"""Compares the predictions of `qspec plan` with measurements on this machine.

    python -m benchmark.bench_plan --output results

The target has one core and the sidecar another, as if they were two devices. The benchmark measures
the tables of `qspec plan` on one server. The same server then serves the demo prompts in several
configurations: without drafts, and in the modes `queue`, `ahead` and `auto`, with 2, 4 and 8 slots.
The requests arrive all at once, or at random times. The simulation serves the same requests, with
the output lengths that were measured. The server has served other requests before, so the
simulation serves the requests twice, and the second time counts.

Prints a table, and writes `plan.svg` and `tables.json` to `--output`. The last line is JSON:
`rows`, each with `config`, `predicted` and `measured`, and `worst_error`, the largest relative
error of `tokens_per_s` and mean `latency_s`. Of the rounds of a configuration, the one counts in
which other processes took the least processor time (`others_share`). The rows also have
`tokens_per_pass` of a request and `pass_ms`, which show the source of an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.harness import charts
from benchmark.harness.cells import Cell, in_turn
from benchmark.harness.configuration import Configuration, facts_of
from benchmark.harness.dataset import render
from benchmark.harness.options import add_servers, parsed, parser_of, positive, settings_of
from benchmark.harness.output import print_record, say, write
from benchmark.harness.report import Figure, Table
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import send_each, serve, warm_up
from benchmark.harness.speculation import update_settings, wait_for_sidecar
from benchmark.prompts import PROMPTS
from sglang_qspec.config import MODES
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.measure.server_tables import Measurement
from sglang_qspec.tools.measure.tables import Tables, save
from sglang_qspec.tools.plan.simulation import Group, simulate
from sglang_qspec.tools.plan.target import NONE
from sglang_qspec.tools.plan.trace import Arrival

LINK_S = 0.0005
"""Assumed seconds of a message between two processes of one machine."""
FIGURES = ("tokens_per_s", "latency_s")
"""Figures that are compared."""
DIGITS = {"tokens_per_s": 1, "latency_s": 2, "tokens_per_pass": 2, "pass_ms": 1}
"""Digits after the point of all figures of a row."""


Figures = Mapping[str, float]
"""Figures of a configuration by their names, as in DIGITS."""


def cells_of(rate: float) -> list[Cell]:
    """All configurations; `rate` is that of the arrivals at random times, in arrivals per second.

    A cell has the mode as its configuration, and a rate of 0 if all requests arrive at once.
    """
    at_once = [
        *((mode, 4) for mode in (NONE, "queue", "ahead", "auto")),
        *((mode, slots) for slots in (2, 8) for mode in (NONE, "auto")),
    ]
    later = [(mode, 4, rate) for mode in (NONE, "queue", "auto")]
    every = [*((mode, slots, 0.0) for mode, slots in at_once), *later]
    return [Cell.of(1, mode, slots=slots, rate=found) for mode, slots, found in every]


def name_of(cell: Cell) -> str:
    """The name of a configuration in the results."""
    arrivals = f"{cell['rate']:g}/s" if cell["rate"] else "at once"
    return f"{cell.config}, {cell['slots']} slots, {arrivals}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = settings_of(options, 8, 2048, 16384)
    texts = PROMPTS[: options.prompts]
    prompts = render(settings.model, texts)
    flags = ("--speculative-num-draft-tokens", "16")
    configuration = Configuration("QSPEC", settings, settings.qspec(*flags), settings.target_cores)
    say("starting SGLang")
    cells = cells_of(options.request_rate)
    found: dict[str, list[dict[str, Any]]] = {name_of(cell): [] for cell in cells}
    with configuration.server() as server:
        wait_for_sidecar(server)
        lengths = [len(Client(server.url).chat_ids(text)) for text in texts]
        say("measuring the tables")
        measurement = Measurement(server.url, texts, options.max_new_tokens)
        tables = measurement.tables([1, 2, 4, 8], draft=settings.draft_model.name)
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            save(tables, options.output / "tables.json")
        for cell in in_turn(cells, options.rounds):
            times = times_of(cell, len(prompts))
            run = measure(server, cell, prompts, times, options.max_new_tokens)
            asked = zip(times, lengths, (answer.tokens for answer in run.answers), strict=True)
            arrivals = list(map(Arrival._make, asked))
            row = row_of(name_of(cell), predict(tables, cell, arrivals), run)
            found[row["config"]].append(row)
            say(f"{row}")
    rows = [min(each, key=lambda row: row["others_share"]) for each in found.values()]
    record = summary(rows)
    print(table_of(rows).text())
    if options.output is not None:
        given = {name: getattr(options, name) for name in ("prompts", "max_new_tokens", "rounds")}
        facts = facts_of(settings, **given)
        write(options.output, {**record, **facts}, figures_of(rows))
    print_record(record)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("bench_plan", __doc__)
    add = parser.add_argument
    add("--prompts", type=positive, default=12, help="requests (default and most: 12)")
    add("--max-new-tokens", type=positive, default=96, help="output tokens (default: 96)")
    add("--rounds", type=positive, default=2, help="the least disturbed counts (default: 2)")
    add("--request-rate", type=float, default=1.0, help="arrivals per second (default: 1)")
    add("--output", type=Path, help="folder of the results (default: none are written)")
    add_servers(parser, "bfloat16")
    options = parsed(parser, argv)
    if not 0.0 < options.request_rate < float("inf"):
        parser.error(f"--request-rate is {options.request_rate}, but must be above 0")
    return options


def times_of(cell: Cell, requests: int) -> list[float]:
    """Arrival times, the same in every run."""
    if not cell["rate"]:
        return [0.0] * requests
    gaps = np.random.default_rng(1).exponential(1.0 / cell["rate"], requests)
    return [float(each) for each in gaps.cumsum()]


def measure(
    server: Server, cell: Cell, prompts: Sequence[str], times: Sequence[float], tokens: int
) -> Run:
    """Set the server to the configuration, and serve the prompts."""
    mode = MODES.index("queue" if cell.config == NONE else cell.config)
    enabled = int(cell.config != NONE)
    values = {
        "pp_max_micro_batch_size": cell["slots"],
        "qspec_mode": mode,
        "qspec_enabled": enabled,
    }
    update_settings(server, values)
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    return serve(
        server,
        lambda: send_each(server, prompts, sampling, times),
        lambda: warm_up(server, cell["slots"] + 2, sampling),
        has_sidecar=True,
        await_sidecar=bool(enabled),
    )


def predict(tables: Tables, cell: Cell, arrivals: Sequence[Arrival]) -> Figures:
    """The figures of the simulation."""
    group = Group(cell.config, cell["slots"], delay=LINK_S)
    found = simulate(group, tables, arrivals, before=arrivals)
    return {
        "tokens_per_s": found.rate,
        "latency_s": found.latency,
        "tokens_per_pass": found.tokens_per_pass,
        "pass_ms": 1e3 * found.pass_seconds,
    }


def row_of(config: str, predicted: Figures, run: Run) -> dict[str, Any]:
    """A row of the results."""
    decoded = run.tokens - len(run.answers)
    measured = {
        "tokens_per_s": run.tokens_per_s,
        "latency_s": run.latency_mean,
        "tokens_per_pass": decoded / max(1, sum(answer.passes for answer in run.answers)),
    }
    if run.counters is not None and (passes := run.counters.total("passes")):
        measured["pass_ms"] = 1e3 * run.counters.total("seconds") / passes
    return {
        "config": config,
        "predicted": rounded(predicted),
        "measured": rounded(measured),
        "others_share": round(run.others_share, 3),
    }


def rounded(figures: Figures) -> Figures:
    return {name: round(value, DIGITS[name]) for name, value in figures.items()}


def error_of(row: Mapping[str, Any], figure: str) -> float:
    """Relative error of a predicted figure."""
    return float(row["predicted"][figure] / row["measured"][figure] - 1.0)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For the line of JSON."""
    worst = max(abs(error_of(row, figure)) for row in rows for figure in FIGURES)
    return {"name": "bench_plan", "rows": list(rows), "worst_error": round(worst, 3)}


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        [
            str(row["config"]),
            *(
                text
                for figure in FIGURES
                for text in (
                    f"{row['predicted'][figure]}",
                    f"{row['measured'][figure]}",
                    f"{100 * error_of(row, figure):+.0f} %",
                )
            ),
        ]
        for row in rows
    ]
    head = ("configuration", "tokens/s", "measured", "error", "mean s", "measured", "error")
    return Table("Predicted and measured", head, lines)


def figures_of(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Predicted and measured figures by configuration; empty without matplotlib."""
    if not charts.available():
        return []
    panels = {
        title: {
            kind: {row["config"]: row[kind][figure] for row in rows}
            for kind in ("measured", "predicted")
        }
        for title, figure in zip(("tokens/s", "mean latency in s"), FIGURES, strict=True)
    }
    svg = charts.points(panels, hollow="predicted")
    return [Figure("plan", "Predicted and measured", "", svg)]


if __name__ == "__main__":
    raise SystemExit(main())
