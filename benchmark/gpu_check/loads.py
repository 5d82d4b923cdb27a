"""Runs `bench_queue` and `bench_worst_case` with small loads, each as its own command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.gpu_check.environment import ROOT
from benchmark.gpu_check.outcome import Options, Steps
from benchmark.harness.report import Table
from benchmark.harness.statistics import number
from benchmark.prompts import PROMPTS

CONFIGS = ("none", "qspec-8")
LEVELS = ("1", "8")


def queue(options: Options, steps: Steps) -> None:
    """Queue speculation on the demo's prompts against no speculation, one round."""
    tokens = "16" if options.emulated else "96"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        dataset = Path(folder) / "prompts.jsonl"
        dataset.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
        arguments = ["--dataset", str(dataset), "--max-new-tokens", tokens, "--dtype", "bfloat16"]
        record = run("bench_queue", [*arguments, "--configs", *CONFIGS], options)
    steps.found.figures |= {"rows": record["rows"], "command": record["command"]}
    columns = {name: _field(name) for name in ("config", "tokens_per_s", "speedup", "accept_len")}
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
    names = ("case", "in_flight", "config", "tokens_per_s", "speedup", "accept_len")
    columns = {name: _field(name) for name in names}
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


def _field(name: str) -> Any:
    return lambda row: number(row.get(name))
