"""Runs one part in a process of its own: a CUDA error spoils only the process that made it.

python -m benchmark.gpu_check.child PART OPTIONS FILE
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from benchmark.gpu_check.outcome import Options, Steps
from benchmark.gpu_check.parts import BY_NAME


def main() -> None:
    name, options, path = sys.argv[1:]
    # SIGTERM then raises KeyboardInterrupt, so that every server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    decoded = msgspec.json.decode(options, type=Options)
    if not decoded.on_gpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    BY_NAME[name].run(decoded, Steps(Path(path)))


if __name__ == "__main__":
    main()
