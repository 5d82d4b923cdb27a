"""The check `measure`: the times of both models, and what to expect of a server."""

from __future__ import annotations

import sys
from typing import Any

from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, ok, warning


def measure(case: Case) -> Finding:
    """Measure both models for about a minute, and predict the throughput; shows progress."""
    from rich.console import Console
    from rich.progress import Progress

    from sglang_qspec.engine.start.arguments import DRAFT_TOKENS
    from sglang_qspec.tools.doctor.measure import expectation, times
    from sglang_qspec.tools.theory.forecast import PAYS

    assert case.kind is not None
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("measuring", total=1.0)
        measured = times.measure(
            case,
            lambda text, done: progress.update(task, description=text, completed=done),
        )
    predicted = expectation.predict(measured, DRAFT_TOKENS[case.kind] - 1)
    case.expectation = expectation.paragraph(measured, predicted)
    case.drafts_pay = any(each.speedup >= PAYS for each in predicted)
    case.measured = as_json(measured, predicted)
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


def as_json(measured: Any, predicted: Any) -> dict[str, Any]:
    """The object `measured` of `--json`; times are in seconds."""
    return {
        name: [
            {"rows": int(rows), "seconds": seconds}
            for rows, seconds in zip(curve.places, curve.values, strict=True)
        ]
        for name, curve in (
            ("plain", measured.plain),
            ("verify", measured.verify),
            ("draft", measured.draft),
        )
    } | {
        "verify_slowdown": measured.slowdown.verify,
        "draft_slowdown": measured.slowdown.draft,
        "agreement": measured.agreement,
        "compared_tokens": measured.compared,
        "predicted": [each.record() for each in predicted],
    }
