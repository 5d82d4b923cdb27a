"""Queue speculation against no speculation and n-gram speculation, on a set of prompts.

    python -m benchmark.bench_queue --dataset spec_bench.jsonl --num-prompts 10

Every configuration is a server of its own, and all of them serve the same prompts, group after
group, each group as one queue in front of few running slots. One server runs at a time, so that the
configurations do not disturb each other; they follow each other within a round, rounds in turn
forwards and backwards, and each is compared with `none` of the same round. Figures are medians over
the rounds. On a CPU the target has one core and the sidecar another.

Prints a table, writes a report as one HTML file, and ends with a line of JSON: `rows`, and
`equal_hardware_speedup` (qspec-8 over no speculation on the same cores).
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.demo import render, say
from benchmark.queueing import dataset
from benchmark.queueing.configurations import (
    DESCRIPTIONS,
    NAMES,
    Settings,
    configuration,
    used_cores,
)
from benchmark.queueing.machine import machine, versions
from benchmark.queueing.measures import Round
from benchmark.queueing.report import page, table
from benchmark.queueing.serving import GroupRun, Load, serve
from benchmark.queueing.summary import Summary, summarize


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        groups = dataset.by_group(dataset.load(options.dataset), options.groups)
    except dataset.DatasetError as error:
        sys.exit(f"bench_queue: error: {error}")
    settings = settings_of(options)
    load, skipped = load_of(groups, settings, options)
    configs = [name for name in NAMES if name in options.configs]
    rounds, failed = run_rounds(configs, settings, load, options.rounds)
    summary = summarize(rounds, configs, failed)
    finish(summary, load, skipped, settings, options)
    return 0 if summary.rows else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(
        description=summary,
        prog="python -m benchmark.bench_queue",
        epilog="configurations: "
        + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()),
    )
    add = parser.add_argument
    add("--dataset", type=Path, required=True, help="Spec-Bench's questions, or JSONL of `prompt`")
    add("--groups", nargs="+", help="of the prompts to serve (default: all)")
    add("--num-prompts", type=_positive, help="of each group, evenly over it (default: all)")
    add("--configs", nargs="+", choices=NAMES, default=list(NAMES), help="to serve (default: all)")
    add("--rounds", type=_positive, default=1, help="of all configurations; medians (default: 1)")
    add("--slots", type=_positive, default=2, help="requests that run at once (default: 2)")
    add("--max-new-tokens", type=_positive, default=128, help="of each answer (default: 128)")
    add("--context-length", type=_positive, default=2048, help="in tokens (default: 2048)")
    add("--request-rate", type=_rate, default=math.inf, help="per second (default: inf, at once)")
    add(
        "--dtype",
        default="float32",
        help="of the target; float32 (the default) lets outputs be compared exactly, since "
        "bfloat16 kernels of different shapes may break ties differently",
    )
    add("--model", type=Path, help="the target (default: the demo model)")
    add("--draft-model", type=Path, help="the sidecar's (default: the demo model's 8-bit copy)")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    add("--output", type=Path, help="folder of the report (default: a new temporary folder)")
    options = parser.parse_args(argv)
    if (options.model is None) != (options.draft_model is None):
        parser.error("--model and --draft-model go together: they must have one vocabulary")
    return options


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, or inf")
    return value


def settings_of(options: argparse.Namespace) -> Settings:
    model, draft_model = options.model, options.draft_model
    if model is None:
        from sglang_qspec.models import demo_models

        say("preparing the demo models (a minute the first time)")
        model, draft_model = demo_models().target, demo_models().draft
    return Settings(
        model,
        draft_model,
        options.dtype,
        options.slots,
        options.context_length,
        on_gpu=not options.cpu and shutil.which("nvidia-smi") is not None,
    )


def load_of(
    groups: Mapping[str, Sequence[dataset.Prompt]], settings: Settings, options: argparse.Namespace
) -> tuple[Load, dict[str, int]]:
    """The prompts to serve, and how many of each group were too long for the context."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    limit = settings.context_length - options.max_new_tokens
    prompts: dict[str, Sequence[str]] = {}
    skipped: dict[str, int] = {}
    for group, members in groups.items():
        rendered = render(settings.model, [prompt.text for prompt in members])
        fitting = [text for text in rendered if len(tokenizer(text).input_ids) < limit]
        skipped[group] = len(rendered) - len(fitting)
        if fitting:
            prompts[group] = dataset.spread(fitting, options.num_prompts)
        say(f"{group}: {len(prompts.get(group, []))} prompts; {skipped[group]} are too long")
    if not prompts:
        sys.exit(f"bench_queue: error: no prompt has fewer than {limit} tokens")
    return Load(prompts, options.max_new_tokens, options.request_rate), skipped


def run_rounds(
    configs: Sequence[str], settings: Settings, load: Load, count: int
) -> tuple[list[Round], dict[str, str]]:
    """All rounds, and why configurations failed; one that fails is left out from then on."""
    rounds: list[Round] = []
    failed: dict[str, str] = {}
    for number in range(1, count + 1):
        served: dict[str, list[GroupRun]] = {}
        order = configs if number % 2 else configs[::-1]
        for place, name in enumerate(order, 1):
            if name in failed:
                continue
            progress = f"round {number}/{count}, {name} ({place}/{len(order)}):"
            try:
                served[name] = serve(configuration(name, settings), load, progress)
            # ServerError is one; so is a sidecar that is not ready in time.
            except (RuntimeError, OSError) as error:
                failed[name] = reason(error)
                say(f"{progress} failed: {error}")
        rounds.append(served)
    return rounds, failed


def reason(error: Exception) -> str:
    """One line of an error that may hold a server's log: the last that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "xception" in line]
    found = (telling or lines or [type(error).__name__])[-1]
    return found[:300]


def finish(
    summary: Summary,
    load: Load,
    skipped: Mapping[str, int],
    settings: Settings,
    options: argparse.Namespace,
) -> None:
    """Write the report, print the table and the line of JSON."""
    folder = options.output or Path(tempfile.mkdtemp(prefix="bench_queue_"))
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.html"
    facts: dict[str, Any] = {
        "command": shlex.join(sys.orig_argv),
        "machine": machine(),
        "versions": versions(),
        "cores": used_cores(settings),
        "settings": {name: str(value) for name, value in asdict(settings).items()},
        "max_new_tokens": load.max_new_tokens,
        "request_rate": str(load.request_rate),
        "rounds": options.rounds,
        "prompts": {group: len(prompts) for group, prompts in load.prompts.items()},
        "too_long": dict(skipped),
    }
    shown = {name: v if isinstance(v, str) else json.dumps(v) for name, v in facts.items()}
    report.write_text(page(summary, shown), encoding="utf-8")
    print("\n" + table(summary))
    print(f"\nreport: {report}")
    equal = summary.equal_hardware_speedup
    record = {
        "rows": summary.records(),
        "equal_hardware_speedup": None if equal is None else round(equal, 3),
        **facts,
    }
    (folder / "results.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    raise SystemExit(main())
