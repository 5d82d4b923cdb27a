"""What decode passes are counted as, in the trials that decide which drafts rounds use."""

from __future__ import annotations

import pytest

from sglang_qspec.engine.passes.decide import core_use
from sglang_qspec.engine.passes.decide.core_use import CoreUse
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.policy import DraftUse, LastRequests, PassCost, PassTimes
from sglang_qspec.trie import DraftTrees, Source
from test.engine.passes.divided import REQUESTS, RUNTIME, Cores, speculator, trees_of

ALL, NONE = DraftUse.ALL, DraftUse.NONE


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_use, "TargetCores", Cores)


def test_a_pass_that_something_else_stopped_changes_no_decision() -> None:
    """Drafts give twice the tokens per second; a fifth of the time the machine stands still."""
    divided = CoreUse(Placement("cpu", cores="1"), PassTimes(PassCost(0, 0, 0)), speculator())
    found = []
    for round_ in range(1000):
        found.append(divided.enter(REQUESTS, RUNTIME))
        drafts = found[-1] is ALL
        seconds = 5.0 if round_ % 200 == 60 else 0.1
        divided._times.observe(REQUESTS, 4 if drafts else 1, seconds)
        nodes = [[1] if drafts else []] * REQUESTS
        trees = trees_of(Source.STEP) if drafts else DraftTrees.roots(REQUESTS)
        divided.observe(trees, nodes, (1 + drafts) * REQUESTS, seconds)
    (level,) = divided._speculator.totals.describe()["draft_trials"]
    assert level["tokens_per_s"]["all"] == pytest.approx(2 * REQUESTS / 0.1, rel=0.1)
    assert found[100:].count(ALL) > 0.9 * len(found[100:])


def test_at_the_end_of_a_batch_drafts_must_help_the_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Passes with drafts take half as long again, and give one of two requests a token more."""
    monkeypatch.setattr(LastRequests, "certainty", 1.0)

    def share(progress: int, *, others_wait: bool) -> float:
        active = speculator()
        active.others_wait, active.passes_left = others_wait, lambda: {"a": 1000.0}
        use = CoreUse(Placement("cpu", cores="1"), PassTimes(PassCost(0, 0, 0)), active)
        found = []
        for _ in range(2000):
            found.append(use.enter(REQUESTS, RUNTIME))
            drafts = found[-1] is not NONE
            seconds, tokens = (0.12, 3) if drafts else (0.1, 2)
            trees = trees_of(Source.PROMPT) if drafts else DraftTrees.roots(REQUESTS)
            use._times.observe(REQUESTS, 4 if drafts else 1, seconds)
            nodes = [[1] if drafts else [], []]
            use.observe(trees, nodes, tokens, seconds, progress if drafts else 1)
        return found[500:].count(NONE) / len(found[500:])

    assert share(1, others_wait=False) > 0.8
    assert share(2, others_wait=False) < 0.2
    assert share(1, others_wait=True) < 0.2
