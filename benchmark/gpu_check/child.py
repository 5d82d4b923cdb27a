"""Runs one part in a process of its own: a CUDA error spoils only the process that made it.

`benchmark.gpu_check.check` starts it with a module, a function, the options and a file. Servers of
an emulated check pass as GPU servers do (`test.engine.gpu_shape`).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmark.gpu_check.findings import Options, Steps
from test.engine.faulty import plugin
from test.engine.gpu_shape import GPU_SHAPE

TESTS = "benchmark.gpu_check.pytests"
"""The module of the parts that run tests, which choose the shape of their servers themselves."""


def main() -> None:
    module, function, options, path = sys.argv[1:]
    # SIGTERM then raises KeyboardInterrupt, so that every server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    decoded = msgspec.json.decode(options, type=Options)
    if not decoded.on_gpu:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    steps = Steps(Path(path))
    with steps.check(), tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        if decoded.emulated and module != TESTS:
            os.environ.update(plugin(Path(folder), "def load():" + GPU_SHAPE))
        getattr(importlib.import_module(module), function)(decoded, steps)


if __name__ == "__main__":
    main()
