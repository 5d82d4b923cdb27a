"""Checks of the start itself: SGLang's arguments, and where the two models go."""

from __future__ import annotations

from sglang_qspec.engine.placement import environment
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, failure, ok


def start(case: Case) -> Finding:
    """Whether the checks of a server's start accept models and settings; raises if not."""
    from sglang_qspec.engine.start import preflight

    arguments = preflight.resolved(**case.server_arguments())
    case.arguments = arguments
    case.placement = environment.read()
    return ok(
        f"SGLang and QSPEC accept the models and the settings (attention backend "
        f"{arguments.decode_attention_backend or arguments.attention_backend})"
    )


def placement(case: Case) -> Finding:
    """Where target and draft model go, and whether their memory holds them."""
    import psutil

    from sglang_qspec.engine.placement.devices import visible_gpus
    from sglang_qspec.engine.placement.memory import weight_bytes
    from sglang_qspec.sidecar.memory import cpu_bytes, gib, kv_bytes

    assert case.model is not None
    fraction = case.arguments.mem_fraction_static
    weights = weight_bytes(case.model)
    if case.kind == "cpu":
        place, free = "the CPU", psutil.virtual_memory().available
    else:
        place = f"cuda:{case.index}"
        free = next((gpu.free for gpu in visible_gpus() if gpu.index == case.index), 0)
    found = (
        f"target on {place} with {fraction:.2f} of the available memory ({gib(fraction * free)})"
    )
    if weights is not None and free and fraction * free <= weights:
        return failure(
            f"{found}, but it has {gib(weights)} of weights",
            "Take a smaller or quantized target, or free memory.",
        )
    placed = case.placement
    if placed is None or case.draft_model is None:
        return ok(f"{found}; no sidecar of its own")
    part = f"{placed.mem_fraction:g} of the memory" if placed.mem_fraction else "all memory"
    where = "the target's GPU" if placed.shared else "the CPU"
    if not placed.shared and placed.device != "cpu":
        where = placed.device
    found += f"; sidecar on {where} with {part}"
    draft = weight_bytes(case.draft_model)
    if placed.device == "cpu" and draft is not None:
        total = psutil.virtual_memory().total
        room = kv_bytes(total, placed.mem_fraction, draft, 0)  # raises DraftModelError
        found += (
            f" (takes {gib(cpu_bytes(total, placed.mem_fraction))}: {gib(draft)} of weights, up to "
            f"{gib(room)} of KV, and what Python, torch and SGLang need)"
        )
    return ok(found)
