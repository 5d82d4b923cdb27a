"""Runs the demo, `bench_queue` and `bench_worst_case` with small loads, each as its own command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.gpu_check.environment import ROOT
from benchmark.gpu_check.findings import Options, Steps
from benchmark.harness.report import Table, fields
from benchmark.harness.statistics import number
from benchmark.prompts import PROMPTS

CONFIGS = ("none", "qspec-8")
LEVELS = ("1", "8")
SLOTS = "4"
DTYPES = ("float32", "bfloat16")
EXACT = "float32"
"""Dtype in which greedy answers are equal. The last bits of bfloat16 logits depend on the number of
rows in a pass. On GPUs SGLang's attention kernels for float32 are Triton's."""


def compilation(options: Options, steps: Steps) -> None:
    """The demo with short answers in each dtype of the other parts, which then compile nothing."""
    for dtype in DTYPES:
        began = time.monotonic()
        run("demo", ["--slots", SLOTS, "--max-new-tokens", "2", "--dtype", dtype], options)
        steps.found.figures[f"{dtype}_seconds"] = round(time.monotonic() - began, 1)


def parity(options: Options, steps: Steps) -> None:
    """The demo: greedy answers without speculation and with QSPEC must be equal."""
    tokens = "16" if options.emulated else "128"
    arguments = ["--slots", SLOTS, "--max-new-tokens", tokens, "--dtype", EXACT]
    record = run("demo", arguments, options)
    steps.found.identical = record["identical"]
    steps.found.figures |= record
    count, different = len(PROMPTS), record["different"]
    lengths = (1.0, record["accept_len"])
    rows = zip(("no speculation", "QSPEC"), record["tokens_per_s"], lengths, strict=True)
    lines = [(*map(number, row), f"{count - len(different)} of {count}") for row in rows]
    head = ("", "tokens/s", "accept length", "equal answers")
    note = f"{EXACT}, {SLOTS} running at once; two runs of a few seconds, so no ratio."
    steps.found.tables.append(Table("Greedy parity", head, lines, note))
    with steps.check("greedy"):
        assert not different, f"{len(different)} of {count} answers differ: {different}"
    with steps.check("drafts"):
        assert sum(record["accepted_by_source"].values()) > 0, "no draft token was accepted"


def queue(options: Options, steps: Steps) -> None:
    """Queue speculation on the demo's prompts against no speculation, one round."""
    tokens = "16" if options.emulated else "96"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        dataset = Path(folder) / "prompts.jsonl"
        dataset.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
        arguments = ["--dataset", str(dataset), "--max-new-tokens", tokens, "--dtype", "bfloat16"]
        record = run("bench_queue", [*arguments, "--configs", *CONFIGS], options)
    steps.found.figures |= {"rows": record["rows"], "command": record["command"]}
    columns = fields("config", "tokens_per_s", "speedup", "accept_len")
    note = "One round, so the speedup has no spread. bfloat16, 2 running at once."
    steps.found.tables.append(Table.of("bench_queue in small", record["rows"], columns, note))
    with steps.check("rows"):
        assert {row["config"] for row in record["rows"]} >= set(CONFIGS)


def worst_case(options: Options, steps: Steps) -> None:
    """Loads where drafts do not pay, against no speculation, one round."""
    levels = LEVELS[:1] if options.emulated else LEVELS
    cases = ("wrong-guesses", "random-text") if options.emulated else ()
    tokens = "16" if options.emulated else "48"
    arguments = ["--levels", *levels, "--rounds", "1", "--max-new-tokens", tokens]
    arguments += ["--cases", *cases] if cases else []
    record = run("bench_worst_case", arguments, options)
    kept = ("worst_ratio", "rows", "failed", "command")
    steps.found.figures |= {name: record.get(name) for name in kept}
    columns = fields("case", "in_flight", "config", "tokens_per_s", "speedup", "accept_len")
    note = "One round, so a speedup has no spread."
    steps.found.tables.append(Table.of("bench_worst_case in small", record["rows"], columns, note))
    with steps.check("cells"):
        assert not record["failed"], f"cells failed: {record['failed']}"


def run(name: str, arguments: Sequence[str], options: Options) -> dict[str, Any]:
    """The line of JSON of a benchmark. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", f"benchmark.{name}", *arguments]
    command += [] if options.on_gpu else ["--cpu"]
    if options.flags:
        command.append(f"--flags={shlex.join(options.flags)}")
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    try:
        record: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stdout[-500:]}") from error
    return record
