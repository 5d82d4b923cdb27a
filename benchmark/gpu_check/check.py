"""Runs the parts, each in a process with a time limit, and sums up their results."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmark.gpu_check.environment import ROOT
from benchmark.gpu_check.findings import Findings, Options
from benchmark.gpu_check.memory import Peak
from benchmark.gpu_check.parts import PARTS, Part
from benchmark.harness import standin
from benchmark.harness.output import say

STOP_SECONDS = 20.0
"""Time for a part to stop its servers after its limit."""
LEAST_SECONDS = 5.0
"""Minimum of the total time that must be left when a part starts."""


def check(
    names: Sequence[str],
    options: Options,
    seconds: float,
    folder: Path,
    parts: Sequence[Part] = PARTS,
) -> dict[str, Findings]:
    """Run the parts with these names, or all; returns findings by part, in the order of `parts`.

    `seconds` is the limit of all parts together that count. Logs of the parts are in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    found: dict[str, Findings] = {}
    for part in parts:
        if names and part.name not in names:
            continue
        if options.emulated and part.not_emulated and not names:
            found[part.name] = Findings(skipped={"": part.not_emulated})
            continue
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            found[part.name] = Findings(failed={"": "the total time is over"})
            continue
        say(f"gpu-check: {part.name}: {part.text}")
        limit = min(left, part.seconds) if part.counts else part.seconds
        found[part.name] = run(part, options, limit, folder)
        deadline += 0.0 if part.counts else found[part.name].seconds
        for line in failures({part.name: found[part.name]}).items():
            say("gpu-check: failed: {}: {}".format(*line))
    return found


def run(part: Part, options: Options, limit: float, folder: Path) -> Findings:
    """Run one part; keep its results up to the time limit or a crash."""
    result, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    result.unlink(missing_ok=True)
    encoded = msgspec.json.encode(options).decode()
    command = [sys.executable, "-m", "benchmark.gpu_check.child"]
    command += [part.module, part.name, encoded, str(result)]
    began, ended = time.monotonic(), True
    with log.open("w") as output, Peak() as peak:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(options),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            stop(process)
    findings = Findings.load(result) if result.exists() else Findings()
    if not ended:
        findings.failed[""] = f"the time limit of {limit:.0f} s is over; see {log}"
    elif process.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
        findings.failed[""] = f"ended with {process.returncode}: {last}"
    elif not result.exists():
        findings.failed[""] = f"left no result; see {log}"
    findings.seconds = round(time.monotonic() - began, 1)
    findings.peak_mib = peak.mib
    return findings


def environment(options: Options) -> dict[str, str]:
    """The variables of a part's process."""
    variables = dict(os.environ)
    if not options.on_gpu:
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    elif standin.import_error() is not None:
        variables |= standin.environment()
    return variables


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a part that has not ended, and all processes below it."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(below, STOP_SECONDS)


def failures(found: Mapping[str, Findings]) -> dict[str, str]:
    """Reasons by part, or by `part.check`."""
    return _named({name: findings.failed for name, findings in found.items()})


def skips(found: Mapping[str, Findings]) -> dict[str, str]:
    """Reasons by part, or by `part.check`."""
    return _named({name: findings.skipped for name, findings in found.items()})


def _named(found: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {
        f"{name}.{step}" if step else name: why
        for name, reasons in found.items()
        for step, why in reasons.items()
    }


def summary(found: Mapping[str, Findings]) -> dict[str, Any]:
    """The last line: failed checks, passes outside graphs, and whether greedy answers are equal.

    The passes and the equality of answers are None if no part has found them.
    """
    eager = [each.eager_passes for each in found.values() if each.eager_passes is not None]
    same = [each.identical for each in found.values() if each.identical is not None]
    return {
        "failed": list(failures(found)),
        "eager_passes": sum(eager) if eager else None,
        "identical": all(same) if same else None,
        "skipped": list(skips(found)),
    }
