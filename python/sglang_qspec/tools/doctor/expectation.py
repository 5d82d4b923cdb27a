"""What to expect of a server, by the measured times and the formulas of docs/theory.md."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_qspec.tools.measure.pair import Measured
from sglang_qspec.tools.measure.tables import PairTimes, PassSeconds
from sglang_qspec.tools.theory.prediction import PAYS, Prediction, best_pipeline

IN_FLIGHT = (1, 2, 4, 8, 16)
"""Numbers of requests in flight of the prediction."""
MOST_ROWS = 64
"""Maximum number of rows of a predicted pass: no larger pass was measured."""
SHOWN_ROWS = (1, 4, 16)
"""Rows of the passes that the paragraph names."""


def predict(measured: Measured, most_draft_tokens: int) -> list[Prediction]:
    """The best pipeline for each of IN_FLIGHT, with at most `most_draft_tokens` in a pass."""
    passes = PassSeconds(
        {
            (b, width): measured.verify(b * width)
            for b in IN_FLIGHT
            for width in range(1, most_draft_tokens + 2)
            if b * width <= MOST_ROWS
        }
    )
    times = PairTimes(measured.plain, passes, measured.draft, slowdown=measured.slowdown)
    return [best_pipeline(times, measured.agreed, b) for b in IN_FLIGHT]


def paragraph(measured: Measured, predicted: Sequence[Prediction]) -> str:
    """What to expect, in one paragraph."""
    gains = [each for each in predicted if each.speedup >= PAYS]
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
        f"{measured.compared} tokens (greedy, QSPEC's own prompts); on your texts this can "
        f"differ. A pass of the target over {numbers} rows takes {shown} ms, and a draft step for "
        f"1 request {1e3 * measured.draft(1):.1f} ms. While both run, the target's passes take "
        f"{measured.slowdown.verify:.2f} times as long, and draft steps "
        f"{measured.slowdown.draft:.2f} times. The prediction is that of docs/theory.md: it knows "
        "decoding with short contexts, and neither prefills nor drafts from the queue, prompts and "
        "guesses."
    )
