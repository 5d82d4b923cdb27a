"""Predicts what step drafts are worth before any round with them is measured.

A server that gives the sidecar its cores only to find out what its drafts are worth loses seconds
where they are worth nothing. The durations of draft steps and of the target's passes tell much of
that beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.pipelines import VerifySeconds, fastest
from sglang_qspec.policy.width import LADDER


@dataclass(frozen=True)
class Forecast:
    """Predicted output tokens per second of a batch."""

    drafts: float
    """With step drafts, in the best pipeline and at the best width."""
    plain: float
    """Without any draft."""
    cold: float
    """While the sidecar reads the texts, so that it has no drafts yet."""


def forecast(
    requests: int,
    *,
    verify_seconds: VerifySeconds,
    plain_seconds: float,
    step_times: Sequence[tuple[float, float]],
    agreement: float,
    widest: int,
    lookahead: int,
    shares_device: bool,
    read_seconds: float = 0.0,
) -> Forecast:
    """The forecast for a batch of `requests`.

    `verify_seconds` are those of passes while the sidecar drafts, and `plain_seconds` those of a
    pass without drafts while it does not. `step_times` has (completions, seconds) of draft steps,
    and is not empty. `agreement` is the probability that a draft token is right after right ones. A
    pass verifies at most `widest` tokens of a request, and the sidecar drafts at most `lookahead`
    ahead. With `shares_device` target and sidecar take turns on one device. For each output token
    of a request the sidecar reads prompts for `read_seconds`; meanwhile passes have no step drafts.
    """
    widths = (*(width for width in LADDER[1:] if width < widest), widest)
    step = Curve.through(step_times)
    found = fastest(
        lambda _k: agreement, widths, requests, verify_seconds, step, lookahead=lookahead
    )
    if shares_device:
        found = {"sequential": found["sequential"]}
    rate = max(rate for rate, _ in found.values())
    undrafted = requests / verify_seconds(requests, 1)
    if rate > undrafted:  # the sidecar reads for a share of the time: `read_seconds` * the result
        rate = max(undrafted, rate / (1.0 + read_seconds * (rate - undrafted)))
    return Forecast(rate, requests / plain_seconds, undrafted)
