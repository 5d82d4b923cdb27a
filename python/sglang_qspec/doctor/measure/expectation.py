"""What to expect of a server, by the measured times and the formulas of docs/theory.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_qspec.doctor.measure.times import Measured
from sglang_qspec.theory.pipelines import estimates

IN_FLIGHT = (1, 2, 4, 8, 16)
"""Numbers of requests in flight of the prediction."""
MOST_ROWS = 64
"""Maximum number of rows of a predicted pass: no larger pass was measured."""
SHOWN_ROWS = (1, 4, 16)
"""Rows of the passes that the paragraph names."""
WORTH = 1.05
"""Predicted speedup from which drafts count as a gain."""


@dataclass(frozen=True)
class Prediction:
    """The best pipeline for a number of requests in flight."""

    in_flight: int
    pipeline: str
    """`sequential`, `halves` or `ahead`; `none` if no draft pays."""
    draft_tokens: int
    """Draft tokens of a request in a pass."""
    tokens_per_s: float
    """Predicted throughput of all requests."""
    plain_tokens_per_s: float
    """Throughput of the target alone on all its CPUs."""

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def predict(measured: Measured, most_draft_tokens: int) -> list[Prediction]:
    """The best pipeline for each of IN_FLIGHT, with at most `most_draft_tokens` in a pass."""
    return [_best(measured, b, most_draft_tokens) for b in IN_FLIGHT]


def _best(measured: Measured, b: int, most: int) -> Prediction:
    plain = b / measured.plain(b)
    best = Prediction(b, "none", 0, plain, plain)
    for k in range(1, min(most, MOST_ROWS // b - 1) + 1):
        for name, rate in _rates(measured, b, k):
            if rate > best.tokens_per_s:
                best = Prediction(b, name, k, rate, plain)
    return best


def _rates(measured: Measured, b: int, k: int) -> Iterator[tuple[str, float]]:
    """Tokens per second of each pipeline. In `halves` and `ahead` both models run at once."""
    apart = estimates(
        measured.agreement,
        k,
        b,
        lambda requests, width: measured.verify(requests * width),
        lambda requests: k * measured.draft(requests),
    )
    yield "sequential", apart["sequential"].rate
    together = estimates(
        measured.agreement,
        k,
        b,
        lambda requests, width: measured.verify_slowdown * measured.verify(requests * width),
        lambda requests: measured.draft_slowdown * k * measured.draft(requests),
    )
    yield "ahead", together["ahead"].rate
    if b > 1:
        yield "halves", together["halves"].rate


def paragraph(measured: Measured, predicted: list[Prediction]) -> str:
    """What to expect, in one paragraph."""
    gains = [each for each in predicted if each.speedup >= WORTH]
    if gains:
        listed = ", ".join(f"{each.speedup:.1f} with {each.in_flight}" for each in gains)
        expected = (
            f"Expect about the following times the tokens/s of the target alone, by requests in "
            f"flight: {listed}."
        )
        rest = [each.in_flight for each in predicted if each not in gains]
        if rest:
            expected += (
                f" With {', '.join(map(str, rest))} in flight the sidecar's drafts do not pay, and "
                "the server pauses them."
            )
    else:
        expected = (
            "The sidecar's drafts do not pay with these models on this machine, so start the "
            "server without a draft model: it still drafts from prompts, outputs and guesses."
        )
    shown = ", ".join(f"{1e3 * measured.verify(rows):.1f}" for rows in SHOWN_ROWS)
    numbers = ", ".join(map(str, SHOWN_ROWS))
    return (
        f"{expected} The draft model agrees with the target on {100 * measured.agreement:.0f} % of "
        f"{measured.compared} tokens (greedy, the doctor's own prompts); on your texts this can "
        f"differ. A pass of the target over {numbers} rows takes {shown} ms, and a draft step for "
        f"1 request {1e3 * measured.draft(1):.1f} ms. While both run, the target's passes take "
        f"{measured.verify_slowdown:.2f} times as long, and draft steps "
        f"{measured.draft_slowdown:.2f} times. The prediction is that of docs/theory.md: it knows "
        "decoding with short contexts, and neither prefills nor drafts from the queue, prompts and "
        "guesses."
    )
