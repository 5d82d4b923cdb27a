"""The processor time of other processes does not include the measured processes."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil

from benchmark.harness.others import Others

BUSY = [sys.executable, "-c", "while True: pass"]


def test_a_process_counts_unless_it_is_the_servers() -> None:
    with subprocess.Popen(BUSY) as process:
        try:
            busy = psutil.Process(process.pid)
            server: Any = SimpleNamespace(processes=[busy])
            stranger: Any = SimpleNamespace(processes=[])
            its_own, foreign = Others(server), Others(stranger)
            began = sum(busy.cpu_times()[:2])
            while sum(busy.cpu_times()[:2]) < began + 0.5:
                pass
            assert foreign.share() > its_own.share()
        finally:
            process.kill()
