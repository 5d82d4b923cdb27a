"""Runs `qspec batch` as a process, and measures what it takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """What one run of the command took."""

    lines: int
    seconds: float
    """Time for the answers, without the start of the command and its check of the input."""
    wall_seconds: float
    """Time of the whole process."""
    cpu_seconds: float
    peak_bytes: int
    """Largest resident memory."""
    tokens: int
    accept_length: float | None
    """None if the server does not report passes."""


def run(arguments: Sequence[str | Path]) -> Cost:
    """Run `qspec batch` with these arguments. Raises RuntimeError if lines failed."""
    command = [sys.executable, "-m", "sglang_qspec", "batch", *map(str, arguments)]
    before = os.times()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = os.times().elapsed - before.elapsed
    process.returncode = os.waitstatus_to_exitcode(status)
    found = re.search(r"(\d+) lines answered, .* in ([\d.]+) s: (\d+) tokens", out)
    if process.returncode or found is None:
        raise RuntimeError(f"qspec batch ended with {process.returncode}:\n{out}")
    length = re.search(r"accept length ([\d.]+)", out)
    return Cost(
        lines=int(found[1]),
        seconds=float(found[2]),
        wall_seconds=wall,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss << 10,
        tokens=int(found[3]),
        accept_length=float(length[1]) if length else None,
    )


def write_input(path: Path, lines: int, prompt_bytes: int = 200) -> None:
    """Write an input in OpenAI's format with different prompts of this size."""
    with path.open("w") as file:
        for number in range(lines):
            prompt = f"{number} ".ljust(prompt_bytes, "x")
            body = {"model": "m", "prompt": prompt, "max_tokens": 4}
            record = {"custom_id": f"request-{number}", "method": "POST", "body": body}
            file.write(json.dumps({**record, "url": "/v1/completions"}) + "\n")
