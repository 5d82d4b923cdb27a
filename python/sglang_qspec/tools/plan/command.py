"""The command `qspec plan`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_qspec import values
from sglang_qspec.config import MODES
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools import declare
from sglang_qspec.tools.plan import trace as traces

if TYPE_CHECKING:
    from sglang_qspec.tools.measure.tables import Tables

MOST_GPUS = 1_000_000

DESCRIPTION = """Predict what a deployment costs: whether a sidecar pays and for how many targets,
which pipeline, the throughput, latency and price of a million output tokens, beside the best plan
without speculation on the same GPUs. An event simulation runs the server's policies in simulated
time with the times of --tables (qspec measure, or computed from data sheets). The figures are
predictions. docs/plan.md describes the model and what it leaves out."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    add("--gpus", "GPUs at hand", values.whole(1, MOST_GPUS), "N", required=True)
    add(
        "--tables",
        "tables of qspec measure, or CARD:TARGET:DRAFT such as H100:8B:0.6B, which are computed "
        "from data sheets",
        metavar="FILE",
        required=True,
    )
    agreement = "agreement of target and draft model, with computed tables only (default: 0.7)"
    add("--alpha", agreement, values.number(0.0, 1.0), "A")
    add(
        "--trace",
        f"arrivals: {traces.ALLOWED} with seconds, prompt_tokens and output_tokens in each line",
        metavar="TRACE",
        default="batch:1000",
    )
    prompts, outputs = values.whole(1, traces.MOST_PROMPT), values.whole(1, traces.MOST_OUTPUT)
    add("--prompt-tokens", "prompt tokens of a request", prompts, "N", default=512)
    add("--output-tokens", "mean output tokens of a request", outputs, "N", default=256)
    add(
        "--slo",
        "limit of the latency: mean, p50, p95 or p99, or ttft, the 95th percentile of the time to "
        "the first token; for example p95=8",
        _slo,
        "NAME=SECONDS",
    )
    add(
        "--slots",
        "running requests of a target to try (default: 8, 32 and 128, as far as the tables go, or "
        "their largest number of requests)",
        values.positive,
        "N",
        nargs="+",
    )
    pipelines = "pipelines to try (default: auto queue)"
    add("--pipelines", pipelines, default=["auto", "queue"], nargs="+", choices=MODES)
    price = "price of a GPU for an hour, in any currency"
    add("--gpu-hour-price", price, values.number(0.0, 1e6), "P", default=2.0)
    delay, bandwidth = values.number(0.0, 10000.0), values.number(0.001, 1e5)
    add("--link-ms", "time of a message between target and sidecar", delay, "MS", default=0.1)
    add("--link-gbit", "bandwidth of a sidecar's link", bandwidth, "G", default=10.0)
    add(
        "--outage",
        "seconds between which each sidecar is down; may be given several times",
        _outage,
        "BEGIN:END",
        default=[],
        action="append",
    )
    add("--seed", "seed of the random numbers", values.whole(0, 1 << 31), "N", default=1)
    add("--sweep", "SVG or PNG of throughput against latency", Path, "PICTURE")
    declare.switch(parser, "--json", "print one line of JSON instead of text")
    parser.set_defaults(run=run)


def _slo(text: str) -> tuple[str, float]:
    """Parse a limit of the latency. Raises ValueError."""
    from sglang_qspec.tools.plan.planner import OBJECTIVES

    name, _, seconds = text.partition("=")
    try:
        value = float(seconds)
    except ValueError:
        value = 0.0
    if name not in OBJECTIVES or not 0.0 < value < float("inf"):
        raise ValueError(f"NAME=SECONDS with a name of {', '.join(OBJECTIVES)} and seconds above 0")
    return name, value


def _outage(text: str) -> tuple[float, float]:
    """Parse the time of an outage. Raises ValueError."""
    try:
        begin, end = map(float, text.split(":"))
    except ValueError:
        begin, end = 0.0, 0.0
    if not 0.0 <= begin < end < float("inf"):
        raise ValueError("BEGIN:END in seconds, with 0 <= BEGIN < END")
    return begin, end


def run(options: argparse.Namespace) -> str:
    """Simulate, and return the text to print. Raises ConfigError for input that is not allowed."""
    from sglang_qspec.tools import picture, table
    from sglang_qspec.tools.plan import sweep
    from sglang_qspec.tools.plan.planner import Planner, Slo, best
    from sglang_qspec.tools.plan.report import DRAFTED, PLAIN, Report
    from sglang_qspec.tools.plan.target import NONE

    if options.sweep is not None:
        picture.check_suffix("--sweep", options.sweep)
    trace = traces.parse(options.trace, options.prompt_tokens, options.output_tokens)
    found = tables_of(options.tables, options.alpha, trace.context)
    slots = _slots(options.slots, found.passes.most_requests)
    slo = None if options.slo is None else Slo(*options.slo)
    if options.gpus < found.gpus.target:
        raise ConfigError(
            f"--gpus is {options.gpus}, but must be at least {found.gpus.target}, the GPUs of one "
            "target"
        )
    given = {"delay": options.link_ms / 1e3, "outages": tuple(options.outage)}
    planner = Planner(found, trace, seed=options.seed, **given)
    plans = {
        DRAFTED: planner.plans(options.gpus, options.pipelines, slots),
        PLAIN: planner.plans(options.gpus, [NONE], slots),
    }
    chosen = {name: best(each, slo) for name, each in plans.items() if each}
    fewest = {}
    if slo is not None and trace.rate:
        for name, each in plans.items():
            if able := [plan for plan in each if plan.meets(slo)]:
                fewest[name] = planner.fewest(min(able, key=lambda plan: plan.needed), slo)
    if options.sweep is not None:
        lines = {name: planner.sweep(options.gpus, each.group) for name, each in chosen.items()}
        gpus = table.counted(options.gpus, "GPU")
        title = f"Predicted: {gpus}, {found.machine} ({found.source})"
        sweep.write(lines, options.sweep, title)
    price, gbit = options.gpu_hour_price, options.link_gbit
    report = Report(options.gpus, found, trace, chosen, fewest, slo, price, gbit)
    return json.dumps(report.record()) if options.json else report.text()


def tables_of(text: str, alpha: float | None, context: int) -> Tables:
    """The tables of a file, or computed ones for requests of `context` tokens.

    Raises ConfigError.
    """
    from sglang_qspec.tools.measure import tables
    from sglang_qspec.tools.plan.cards import computed

    if ":" in text:
        return computed(text, alpha, context)
    if alpha is not None:
        raise ConfigError(
            "--alpha is for computed tables (CARD:TARGET:DRAFT) only, because measured ones have "
            f"the agreement: --tables is {text!r}"
        )
    return tables.load(Path(text))


def _slots(given: Sequence[int] | None, most: int) -> list[int]:
    """The slots to try. Raises ConfigError if the tables do not reach that far."""
    if given is None:
        return [slots for slots in (8, 32, 128) if slots <= most] or [most]
    if max(given) > most:
        raise ConfigError(
            f"--slots is {max(given)}, but must be at most {most}, the largest number of requests "
            "in the tables"
        )
    return sorted(set(given))
