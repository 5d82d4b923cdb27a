"""The entry point that SGLang calls in every process, before the process reads its arguments.

The process that parses arguments and serves clients gets the hooks of `hooks.front`, a scheduler's
process those of `hooks.scheduler`, and the detokenizer's those of `hooks.detokenizer`. With another
algorithm the hooks change nothing. But on a CPU where SGLang's kernels cannot load, `cpu` supplies
kernels to every server.

Each process imports only what it needs, and nothing of SGLang before its version is known.
"""

from __future__ import annotations

import multiprocessing
import sys

import sglang

from sglang_qspec import config
from sglang_qspec.engine.boundary import compat


def load() -> None:
    """Install QSPEC in this process. SGLang calls this once per process."""
    if sglang.__version__ != compat.SGLANG_VERSION:
        _refuse_to_start()
        return
    from sglang_qspec.engine import cpu
    from sglang_qspec.engine.start import algorithm

    cpu.activate()
    algorithm.register()
    if multiprocessing.parent_process() is None or "sglang.srt.entrypoints.engine" in sys.modules:
        _hook_front()
    elif "sglang.srt.managers.detokenizer_manager" in sys.modules:
        _install("detokenizer")
    if "sglang.srt.managers.scheduler" in sys.modules:
        _install("scheduler")


def _hook_front() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from sglang_qspec.engine.start import arguments, lora

    register_resolution_hook("handle_cuda_graph_config")(lora.resolve_graphs)
    register_resolution_hook("handle_gpu_memory_settings")(arguments.resolve_memory)
    register_resolution_hook("handle_speculative_decoding")(arguments.resolve)
    _install("front")


def _install(table: str) -> None:
    """Install the hooks of a table in `engine.start.hooks`."""
    from sglang_qspec.engine.boundary import installed
    from sglang_qspec.engine.start import hooks

    installed.install(table, getattr(hooks, table)())


def _refuse_to_start() -> None:
    """Register QSPEC so that selecting it fails with an error that names the SGLang version."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def refuse(server_args: object) -> None:
        compat.check_version()

    def no_worker(server_args: object) -> type:
        compat.check_version()
        return object

    SpeculativeAlgorithm.register(config.ALGORITHM, validate_server_args=refuse)(no_worker)
