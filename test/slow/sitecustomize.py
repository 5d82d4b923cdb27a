"""Makes the passes of targets or of sidecars slower. Python imports it in each process of a test.

`QSPEC_TEST_SLOW` is `target=5` or `sidecar=5` for passes that take five times as long; the option
`--slow` of the suite sets it. A pass sleeps for a multiple of its CPU time, so a busy machine adds
nothing, and nobody else loses CPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from typing import Any

RUNNER = "sglang.srt.model_executor.model_runner"
"""SGLang's module with the class that runs the passes of both models."""


class Slow(importlib.abc.MetaPathFinder):
    """Changes `RUNNER` when a process imports it."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            sound = module.ModelRunner.forward

            def forward(*given: Any, **named: Any) -> Any:
                began = time.process_time()
                result = sound(*given, **named)
                time.sleep((self._factor - 1) * (time.process_time() - began))
                return result

            module.ModelRunner.forward = forward

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


who, _, times = os.environ.get("QSPEC_TEST_SLOW", "").partition("=")
is_sidecar = {"sidecar", "sglang_qspec.sidecar"} & set(sys.orig_argv)
if who == ("sidecar" if is_sidecar else "target"):
    sys.meta_path.insert(0, Slow(float(times)))
