"""The check `measure`: the times of both models, and what to expect of a server."""

from __future__ import annotations

from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, ok, warning
from sglang_qspec.tools.measure.model_process import ModelOptions


def measure(case: Case) -> Finding:
    """Measure both models for about a minute, and predict the throughput; shows progress."""
    from sglang_qspec.engine.start.arguments import DRAFT_TOKENS
    from sglang_qspec.tools.doctor import expectation
    from sglang_qspec.tools.measure.pair import measure_pair
    from sglang_qspec.tools.theory.prediction import PAYS

    assert case.kind is not None
    assert case.target is not None
    assert case.placement is not None
    measured = measure_pair(
        *_options(case), case.placement.visible, target_vocab=case.target.vocab_size
    )
    predicted = expectation.predict(measured, DRAFT_TOKENS[case.kind] - 1)
    case.expectation = expectation.paragraph(measured, predicted)
    case.drafts_pay = any(each.speedup >= PAYS for each in predicted)
    case.measured = {**measured.record(), "predicted": [each.record() for each in predicted]}
    best = max(predicted, key=lambda each: each.speedup)
    if not case.drafts_pay:
        return warning(
            "no number of requests in flight is predicted to gain from the draft model",
            "Start the server without it, or take a smaller or quantized draft model.",
        )
    return ok(
        f"{best.speedup:.1f} times the target alone is predicted with {best.in_flight} in flight, "
        f"in the pipeline {best.pipeline} with {best.draft_tokens} draft tokens"
    )


def _options(case: Case) -> tuple[ModelOptions, ModelOptions]:
    """How to load both models: where a server does."""
    from sglang_qspec.engine.placement import core_division

    settings, placed = case.settings, case.placement
    assert settings is not None
    assert placed is not None
    assert case.model is not None
    assert case.draft_model is not None
    pinned = core_division.pinned_cpus(settings)
    target = ModelOptions(
        path=case.model,
        device=case.device or case.kind or "",
        mem_fraction=case.arguments.mem_fraction_static,
        shared=case.sidecar_cpus,
        target=True,
    )
    draft = ModelOptions(
        path=case.draft_model,
        device=placed.device,
        cores=pinned or case.sidecar_cpus,
        mem_fraction=placed.mem_fraction,
        dtype=settings.dtype,
        background=placed.device == case.kind == "cpu" and not pinned,
    )
    return target, draft
