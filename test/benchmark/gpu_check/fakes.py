"""Fake parts, with which the tests run `benchmark.gpu_check.check` itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmark.gpu_check.findings import NotHereError, Options, Steps

CHILD_FILE = "GPU_CHECK_TEST_CHILD"
"""Environment variable with the file to which `hanging` writes the pid of its child."""


def fine(options: Options, steps: Steps) -> None:
    steps.found.figures["device"] = options.device
    steps.found.identical = True
    steps.found.eager_passes = 2
    with steps.check("one"):
        pass


def wrong(_options: Options, steps: Steps) -> None:
    steps.found.identical = False
    with steps.check("sum"):
        assert 1 + 1 == 3, "two is not three"
    with steps.check("gpu"):
        raise NotHereError("there is none")
    with steps.check("after"):
        pass
    raise RuntimeError("and then\nthe rest broke")


def crashing(_options: Options, steps: Steps) -> None:
    with steps.check("before"):
        pass
    os._exit(7)


def hanging(_options: Options, steps: Steps) -> None:
    with steps.check("before"):
        pass
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ[CHILD_FILE]).write_text(str(child.pid))
    time.sleep(600)
