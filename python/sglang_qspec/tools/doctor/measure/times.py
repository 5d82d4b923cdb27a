"""Measures the passes of both models, and how often they agree on the next token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_qspec.engine.placement import core_division
from sglang_qspec.errors import MeasureError
from sglang_qspec.policy.curve import Curve
from sglang_qspec.tools.compare import agreement
from sglang_qspec.tools.compare.draft_reader import ROWS
from sglang_qspec.tools.compare.forecast import Slowdown
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.measure.child import Child, open_child
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


class _Part(NamedTuple):
    """A part of the measurement: a share of the work, and a description for the progress."""

    description: str
    run: Callable[[], Any]


def measure(case: Case, advance: Callable[[str, float], None]) -> Measured:
    """Measure the models of `case`, where a server would run them.

    `advance` gets a description of the next part, and the fraction of the work that is done. Raises
    MeasureError if a model cannot be loaded or fails.
    """
    target_options, draft_options = _options(case)
    visible = case.placement.visible if case.placement is not None else None
    with (
        open_child("target", visible, *target_options) as target,
        open_child("draft model", visible, *draft_options) as draft,
    ):
        found: dict[str, Any] = {}
        parts = list(_parts(case, target, draft, found))
        for number, (name, part) in enumerate(parts):
            advance(part.description, number / len(parts))
            found[name] = part.run()
        advance("done", 1.0)
    own = found if case.divides else {**found, **{_own(n): found[_all(n)] for n in VERIFY_ROWS}}
    together, drafted = found["together"]
    return Measured(
        plain=Curve.through((rows, found[_all(rows)]) for rows in VERIFY_ROWS),
        verify=Curve.through((rows, own[_own(rows)]) for rows in VERIFY_ROWS),
        draft=Curve.through((rows, found[_draft(rows)]) for rows in DRAFT_ROWS),
        slowdown=Slowdown(
            verify=max(1.0, together / own[_own(TOGETHER_ROWS)]),
            draft=max(1.0, drafted / found[_draft(TOGETHER_ROWS)]),
        ),
        agreed=found["agreed"],
    )


def _parts(
    case: Case, target: Child, draft: Child, found: dict[str, Any]
) -> Iterator[tuple[str, _Part]]:
    """The parts by name; each can read the results of the parts before it in `found`."""
    yield "target", _Part("loading the target", lambda: target.call("ready"))
    yield "draft", _Part("loading the draft model", lambda: draft.call("ready"))
    yield "prompts", _Part("reading prompts", lambda: target.call("encode", texts=TEXTS))

    def decode() -> Any:
        return target.call("greedy", prompts=found["prompts"], tokens=TOKENS)

    def compare() -> Any:
        if not any(found["texts"]):
            raise MeasureError("the target ends every answer to QSPEC's prompts at once")
        assert case.target is not None
        given = {"prompts": found["prompts"], "texts": found["texts"]}
        return draft.call("agreed", **given, target_vocab=case.target.vocab_size)

    yield "texts", _Part("decoding with the target", decode)
    yield "agreed", _Part("comparing with the draft model", compare)
    for rows in VERIFY_ROWS:
        if case.divides:
            yield _own(rows), _verify(target, rows, everything=False)
        yield _all(rows), _verify(target, rows, everything=True)
    for rows in DRAFT_ROWS:
        yield _draft(rows), _steps(draft, rows)
    yield "together", _Part("running both models", lambda: _together(target, draft))


def _all(rows: int) -> str:
    return f"all {rows}"


def _own(rows: int) -> str:
    return f"own {rows}"


def _draft(rows: int) -> str:
    return f"draft {rows}"


def _verify(target: Child, rows: int, *, everything: bool) -> _Part:
    return _Part(
        f"target, {rows} rows",
        lambda: target.call("seconds", rows=rows, seconds=SECONDS, everything=everything),
    )


def _steps(draft: Child, rows: int) -> _Part:
    return _Part(
        f"draft model, {rows} rows", lambda: draft.call("seconds", rows=rows, seconds=SECONDS)
    )


def _together(target: Child, draft: Child) -> tuple[float, float]:
    """Median seconds of the target's passes and of draft steps that run at the same time."""
    for child in (target, draft):
        child.ask("seconds", rows=TOGETHER_ROWS, seconds=2 * SECONDS)
    return target.answer(), draft.answer()


def _options(case: Case) -> tuple[list[str], list[str]]:
    """Command lines of the two processes, which place the models as a server does."""
    assert case.settings is not None
    placed = case.placement
    assert placed is not None
    pinned = core_division.pinned_cpus(case.settings)
    target = ["--target", f"--model-path={case.model}", f"--device={case.device or case.kind}"]
    target += [f"--mem-fraction={case.arguments.mem_fraction_static}"]
    if case.divides:
        target.append(f"--shared={case.sidecar_cpus}")
    draft = [f"--model-path={case.draft_model}", f"--device={placed.device}"]
    draft.append(f"--cores={pinned or case.sidecar_cpus}")
    draft += [f"--mem-fraction={placed.mem_fraction}", f"--dtype={case.settings.dtype}"]
    if placed.device == case.kind == "cpu" and not pinned:
        draft.append("--background")
    return target, draft
