"""In a child process: a sidecar that serves an endpoint for some seconds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmark.harness.child import draft_model, pin
from benchmark.harness.stopwatch import Stopwatch

FINGERPRINT = "fleet"
"""Stands for the tokenizer that all tenants and the draft model share."""
INSTANT, DRAFT = "instant", "draft model"
"""The two models: one that answers at once, and the real one."""


def sidecar(model_name: str, options: argparse.Namespace) -> Callable[[Any], dict[str, float]]:
    """Load a model; returns a function that serves (endpoint, seconds to warm up, to measure)."""
    pin(options.cores)
    from sglang_qspec.link import LinkServer
    from sglang_qspec.messages import PROTOCOL, Heartbeat, Welcome
    from sglang_qspec.sidecar import pass_runner
    from sglang_qspec.sidecar.drafter import Drafter
    from sglang_qspec.sidecar.loop import serve

    model = _model(model_name, options)

    def serve_for(question: tuple[str, float, float]) -> dict[str, float]:
        endpoint, warm_up_s, seconds = question
        drafter = Drafter(
            model,
            max_completion_tokens=options.tokens,
            prefill_tokens=model.prefill_tokens,
            apart=model_name == DRAFT and options.device == "cpu",
        )
        welcome = Welcome(PROTOCOL, model.name, model.vocab_size, model.rows.context_len)
        server = LinkServer(endpoint, welcome, FINGERPRINT, lambda: Heartbeat(0, 0, 0, 0))
        parts = {name: Stopwatch() for name in ("model", "sampling", "link", "idle")}
        began = time.monotonic() + warm_up_s
        before: tuple[int, float] | None = None

        def stopping() -> bool:
            nonlocal before
            now = time.monotonic()
            if before is None and now >= began:
                before = drafter.statistics.drafted_tokens, time.process_time()
                for part in parts.values():
                    part.reset()
            return now >= began + seconds

        try:
            with (
                parts["model"].on(model, "step", "extend"),
                parts["sampling"].on(pass_runner, "choose_shared"),
                parts["link"].on(server, "send"),
                parts["link"].on(server, "receive", when=_polls),
                parts["idle"].on(server, "receive", when=_waits),
            ):
                serve(drafter, server, stopping)
            elapsed_s = time.monotonic() - began
            tokens, cpu_s = before or (drafter.statistics.drafted_tokens, time.process_time())
            found = {
                "tokens_per_s": (drafter.statistics.drafted_tokens - tokens) / elapsed_s,
                "sidecar_cpu": (time.process_time() - cpu_s) / elapsed_s,
                **{name: part.seconds / elapsed_s for name, part in parts.items()},
            }
            for peer in (*server.peers, *server.departed()):
                drafter.drop(peer)
            drafter.check_integrity()
            return found
        finally:
            server.close()

    return serve_for


def _waits(timeout_ms: int) -> bool:
    """Whether `receive` waits for a message, because there is nothing to draft."""
    return timeout_ms > 0


def _polls(timeout_ms: int) -> bool:
    return not _waits(timeout_ms)


def _model(name: str, options: argparse.Namespace) -> Any:
    if name == INSTANT:
        from benchmark.fleet.instant import InstantModel

        return InstantModel()
    length = options.prompt + options.tokens
    return draft_model(
        options.model_path,
        dtype=options.dtype,
        device=options.device,
        mem_fraction=0.2,
        max_total_tokens=64 * length + 4096,
        context_len=length + 64,
    )
