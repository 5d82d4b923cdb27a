"""The entry point that SGLang calls in every process it starts, before it reads its arguments.

What is installed depends on the process: the one that parses arguments and talks to clients, or
one that runs a scheduler. Nothing here changes a server that runs another algorithm, but for one
thing: on a CPU where SGLang's kernels cannot load, `cpu` supplies them to any server.
"""

from __future__ import annotations

import multiprocessing
import sys

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_qspec.engine import compat, touched


def load() -> None:
    """Install QSPEC in this process. Idempotent through SGLang's own guard."""
    if sglang.__version__ != compat.SGLANG_VERSION:
        _refuse_to_start()
        return
    from sglang_qspec.engine import algorithm, cpu

    cpu.activate()
    algorithm.register()
    if multiprocessing.parent_process() is None or "sglang.srt.entrypoints.engine" in sys.modules:
        _hook_front()
    if "sglang.srt.managers.scheduler" in sys.modules:
        _hook_scheduler()


def _hook_front() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from sglang_qspec.engine import arguments, chats, internal_state, prompts, report

    register_resolution_hook("handle_speculative_decoding")(arguments.resolve)
    hooks = (
        (arguments.add_flags, HookType.AFTER),
        (arguments.read_flags, HookType.AROUND),
        (prompts.serve_generate, HookType.AROUND),
        (prompts.run_grpc, HookType.AROUND),
        (prompts.engine_generate, HookType.AROUND),
        (prompts.engine_async_generate, HookType.AROUND),
        (prompts.convert_completion, HookType.AROUND),
        (chats.process_messages, HookType.BEFORE),
        (chats.convert_chat, HookType.AFTER),
        (chats.convert_anthropic, HookType.AROUND),
        (chats.create_responses, HookType.AROUND),
        (chats.responses_params, HookType.AFTER),
        (chats.ollama_chat, HookType.AROUND),
        (chats.ollama_generate, HookType.AROUND),
        (chats.ollama_params, HookType.AFTER),
        (prompts.generate, HookType.BEFORE),
        (report.settle_meta_info, HookType.AROUND),
        (report.correct_rates, HookType.AFTER),
        (internal_state.check_update, HookType.BEFORE),
    )
    for target, (hook, kind) in zip(touched.HOOKED, hooks, strict=True):
        HookRegistry.register(target, hook, kind)


def _hook_scheduler() -> None:
    from sglang_qspec.engine import endings, internal_state, lifecycle, report, row_width

    hooks = (
        (lifecycle.enqueued, HookType.AFTER),
        (lifecycle.aborted, HookType.AFTER),
        (report.output_streamer_class, HookType.AFTER),
        (lifecycle.polled, HookType.AFTER),
        (internal_state.describe, HookType.AFTER),
        (internal_state.add_handlers, HookType.AFTER),
        (row_width.widened, HookType.AFTER),
        (endings.update_finish_state, HookType.AROUND),
    )
    for target, (hook, kind) in zip(touched.HOOKED_IN_SCHEDULER, hooks, strict=True):
        HookRegistry.register(target, hook, kind)


def _refuse_to_start() -> None:
    """With another SGLang, know the name QSPEC only to say why it does not work."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def refuse(server_args: object) -> None:
        compat.check_version()

    def no_worker(server_args: object) -> type:
        compat.check_version()
        return object

    SpeculativeAlgorithm.register("QSPEC", validate_server_args=refuse)(no_worker)
