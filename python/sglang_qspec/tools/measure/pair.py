"""Measures a target and a draft model, each in a process: their passes, and how they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from sglang_qspec.errors import MeasureError
from sglang_qspec.policy.curve import Curve
from sglang_qspec.tools.measure import agreement
from sglang_qspec.tools.measure.loaded_model import ROWS
from sglang_qspec.tools.measure.model_process import Answer, ModelOptions, open_model
from sglang_qspec.tools.measure.tables import Slowdown
from sglang_qspec.tools.models.prompts import PROMPTS

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

    def record(self) -> dict[str, Any]:
        """The figures as JSON; times are in seconds."""
        curves = {"plain": self.plain, "verify": self.verify, "draft": self.draft}
        times = {
            name: [
                {"rows": int(rows), "seconds": seconds}
                for rows, seconds in zip(curve.places, curve.values, strict=True)
            ]
            for name, curve in curves.items()
        }
        return {
            **times,
            "verify_slowdown": self.slowdown.verify,
            "draft_slowdown": self.slowdown.draft,
            "agreement": self.agreement,
            "compared_tokens": self.compared,
        }


def measure_pair(
    target_options: ModelOptions,
    draft_options: ModelOptions,
    visible: str | None,
    *,
    target_vocab: int,
) -> Measured:
    """Measure both models with `visible` as their CUDA_VISIBLE_DEVICES; shows progress.

    `target_vocab` is the target's number of token ids. A target whose options name `shared` CPUs is
    timed on all its CPUs and without those. Raises MeasureError if a model cannot be loaded or
    fails.
    """
    divides = bool(target_options.shared)
    parts = 6 + len(VERIFY_ROWS) * (1 + divides) + len(DRAFT_ROWS)

    def begin(description: str) -> None:
        progress.set_description(description)
        progress.update()

    with (
        tqdm(total=parts, leave=False, disable=None) as progress,
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
        agreed = draft.call("agreed", answers=answers, target_vocab=target_vocab)
        plain: dict[float, float] = {}
        beside: dict[float, float] = {}
        for rows in VERIFY_ROWS:
            given = {"rows": rows, "seconds": SECONDS}
            if divides:
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
