"""Measures the passes of both models, and how often they agree on the next token."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from sglang_qspec.engine.placement import core_division
from sglang_qspec.errors import MeasureError
from sglang_qspec.policy.curve import Curve
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.measure import agreement
from sglang_qspec.tools.measure.loaded_model import ROWS
from sglang_qspec.tools.measure.model_process import Answer, ModelOptions, open_model
from sglang_qspec.tools.models.prompts import PROMPTS
from sglang_qspec.tools.theory.forecast import Slowdown

VERIFY_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the measured passes of the target."""
DRAFT_ROWS = (1, 2, 4, 8, 16)
"""Rows of the measured steps of the draft model."""
TOGETHER_ROWS = 4
"""Rows of the passes that both models run at the same time."""
SECONDS = 0.7
"""Time for the measurement of one number of rows, in seconds."""
TEXTS = PROMPTS[:ROWS]
"""Prompts of the texts on which the models are compared."""
TOKENS = 48
"""Tokens that the target decodes for each prompt, to compare with the draft model."""


@dataclass(frozen=True)
class Measured:
    """Times in seconds, and the agreement of the models."""

    plain: Curve
    """Passes of the target on all its CPUs, by rows, while the sidecar is idle."""
    verify: Curve
    """The same on the CPUs that the target has beside a sidecar."""
    draft: Curve
    """Steps of the draft model by rows, while the target is idle."""
    slowdown: Slowdown
    """What both cost each other while they run at once."""
    agreed: list[list[bool]]
    """For each greedy answer of the target and position: whether the draft model finds the same
    token likeliest."""

    @property
    def agreement(self) -> float:
        """Share of equal tokens."""
        return agreement.share(self.agreed)

    @property
    def compared(self) -> int:
        """Number of compared tokens."""
        return sum(map(len, self.agreed))


def measure(case: Case, advance: Callable[[str, float], None]) -> Measured:
    """Measure the models of `case`, where a server would run them.

    `advance` gets a description of the next part, and the fraction of the parts that are done.
    Raises MeasureError if a model cannot be loaded or fails.
    """
    assert case.target is not None
    target_options, draft_options = _options(case)
    visible = case.placement.visible if case.placement is not None else None
    parts = 6 + len(VERIFY_ROWS) * (1 + case.divides) + len(DRAFT_ROWS)
    numbers = itertools.count()

    def begin(description: str) -> None:
        advance(description, next(numbers) / parts)

    with (
        open_model("target", target_options, visible) as target,
        open_model("draft model", draft_options, visible) as draft,
    ):
        begin("loading the target")
        target.call("describe")
        begin("loading the draft model")
        draft.call("describe")
        begin("reading prompts")
        prompts = target.call("encode", texts=TEXTS)
        begin("decoding with the target")
        texts = target.call("greedy", prompts=prompts, tokens=TOKENS)
        if not any(texts):
            raise MeasureError("the target ends every answer to QSPEC's prompts at once")
        begin("comparing with the draft model")
        answers = [Answer(*each) for each in zip(prompts, texts, strict=True)]
        agreed = draft.call("agreed", answers=answers, target_vocab=case.target.vocab_size)
        plain: dict[float, float] = {}
        beside: dict[float, float] = {}
        for rows in VERIFY_ROWS:
            given = {"rows": rows, "seconds": SECONDS}
            if case.divides:
                begin(f"target, {rows} rows")
                beside[rows] = target.call("pass_seconds", **given)
            begin(f"target, {rows} rows")
            plain[rows] = target.call("pass_seconds", **given, everything=True)
        beside = beside or plain
        steps: dict[float, float] = {}
        for rows in DRAFT_ROWS:
            begin(f"draft model, {rows} rows")
            steps[rows] = draft.call("pass_seconds", rows=rows, seconds=SECONDS)
        begin("running both models")
        for model in (target, draft):
            model.ask("pass_seconds", rows=TOGETHER_ROWS, seconds=2 * SECONDS)
        together, drafted = target.answer(), draft.answer()
        advance("done", 1.0)
    return Measured(
        plain=Curve.through(plain.items()),
        verify=Curve.through(beside.items()),
        draft=Curve.through(steps.items()),
        slowdown=Slowdown(
            verify=max(1.0, together / beside[TOGETHER_ROWS]),
            draft=max(1.0, drafted / steps[TOGETHER_ROWS]),
        ),
        agreed=agreed,
    )


def _options(case: Case) -> tuple[ModelOptions, ModelOptions]:
    """How to load both models: where a server does."""
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
