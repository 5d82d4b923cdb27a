"""What step drafts are worth is forecast from times of about the same passes, and of reading."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sglang_qspec.engine.passes.decide import core_use
from sglang_qspec.engine.passes.decide.core_use import CoreUse
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.policy import DraftUse, PassCost, PassTimes
from sglang_qspec.trie import Source
from test.engine.passes.divided import REQUESTS, RUNTIME, Cores, count, speculator, trees_of

ALL, SEQUENTIAL, HALVES, TEXTS, NONE = DraftUse


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> CoreUse:
    monkeypatch.setattr(core_use, "TargetCores", Cores)
    return CoreUse(Placement("cpu", cores="1"), PassTimes(PassCost(0, 0, 0)), speculator())


def test_what_cores_are_worth_for_one_request_is_not_assumed_for_many(divided: CoreUse) -> None:
    """One request reads the weights in the same time on any cores; many need them all."""
    times, many = divided._times, 16
    known: Any = divided._speculator
    known.sidecar.step_times = [(1, 0.01), (many, 0.02)]
    divided.enter(many, RUNTIME)
    for cores in (1, 2):
        times.enter_cores(cores)
        for _ in range(20):
            times.observe(1, 1, 0.03)
    for _ in range(20):
        times.observe(many, 1, 0.04)
    found = divided._forecast(many)
    assert found is not None
    assert found.plain == pytest.approx(many / 0.04, rel=0.05)
    assert found.cold == pytest.approx(found.plain / math.sqrt(2.0), rel=0.05)
    times.enter_cores(1)
    for _ in range(20):
        times.observe(many, 1, 0.05)
    found = divided._forecast(many)
    assert found is not None
    assert found.cold == pytest.approx(many / 0.05, rel=0.05), "they are measured"


def test_a_sidecar_that_would_read_until_the_end_of_the_last_requests_gets_no_cpu(
    divided: CoreUse,
) -> None:
    found: Any = divided._speculator
    times = divided._times
    found.sidecar.step_times, found.sidecar.read_seconds = [(1, 0.001), (REQUESTS, 0.001)], 1.0
    for cores in (1, 2):
        times.enter_cores(cores)
        for _ in range(20):
            times.observe(REQUESTS, 1, 0.02)
    assert divided.enter(REQUESTS, RUNTIME, texts=1000) is ALL
    found.others_wait = False
    found.passes_left = lambda: {"a": 100.0, "b": 50.0}
    assert divided.enter(REQUESTS, RUNTIME, texts=0) is ALL, "there is nothing to read"
    for _ in range(40):
        found.last_requests.end(at_limit=True)
    found.last_requests.end_batch()
    divided.observe(trees_of(Source.STEP), [[]] * REQUESTS, REQUESTS, 1.0)  # changes come later
    assert divided.enter(REQUESTS, RUNTIME, texts=1000) in (TEXTS, NONE)
    assert count(divided) == 2
