"""The prediction names the pipeline and width that the theory predicts to be fastest."""

from __future__ import annotations

import random

import pytest

from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.pipelines import estimates
from sglang_qspec.tools.measure.tables import PairTimes, PassSeconds
from sglang_qspec.tools.theory.prediction import best_pipeline

FLAT = PassSeconds({(b, width): 0.04 for b in (1, 4) for width in (1, 2, 4, 8)})
ALWAYS = [[True] * 512]
NEVER = [[False] * 512]


def times(step: float, *, overlaps: bool = True) -> PairTimes:
    """A target with plain passes of 0.02 s and passes of 0.04 s beside steps of `step` seconds."""
    plain, steps = (Curve.through([(1, seconds)]) for seconds in (0.02, step))
    return PairTimes(plain, FLAT, steps, overlaps=overlaps)


def test_a_perfect_draft_that_takes_no_time_gains_the_widest_pass() -> None:
    found = best_pipeline(times(1e-6), ALWAYS, 1)
    assert found.draft_tokens == 7
    assert found.plain_tokens_per_s == 50.0
    assert found.tokens_per_s == pytest.approx(8 / 0.04, rel=0.01)
    assert found.speedup == pytest.approx(4.0, rel=0.01)


def test_a_draft_that_never_agrees_cannot_gain_what_the_target_loses() -> None:
    assert best_pipeline(times(1e-6), NEVER, 1).speedup <= 0.5


def test_models_that_share_a_device_take_turns() -> None:
    apart, shared = (
        best_pipeline(times(0.005, overlaps=overlaps), ALWAYS, 4) for overlaps in (True, False)
    )
    assert apart.pipeline == "ahead"
    assert shared.pipeline == "sequential"
    rates = estimates(1.0, 7, 4, FLAT, lambda _: 7 * 0.005)
    assert shared.tokens_per_s == pytest.approx(rates["sequential"].rate)


def test_a_slow_draft_model_is_used_for_fewer_tokens() -> None:
    rng = random.Random(0)
    agreed = [[rng.random() < 0.8 for _ in range(5000)]]
    fast, slow = (best_pipeline(times(step, overlaps=False), agreed, 1) for step in (1e-4, 0.02))
    assert slow.draft_tokens < fast.draft_tokens
