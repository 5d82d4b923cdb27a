"""Each pass takes the CPUs that its kind needs, and the division follows the measured tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sglang_qspec.engine.passes.decide import core_use
from sglang_qspec.engine.passes.decide.core_use import ABSENT_S, LONG, CoreUse
from sglang_qspec.engine.passes.leader import Leader
from sglang_qspec.engine.passes.lineup import Lineup
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.policy import AnswerKind, DraftUse, PassCost, PassTimes
from sglang_qspec.policy.draft_trials import FORECAST_EVERY
from sglang_qspec.policy.runtime_settings import RuntimeSettings
from sglang_qspec.trie import DraftTrees, Source
from test.engine.passes.divided import REQUESTS, RUNTIME, Cores, count, speculator, trees_of

PASS_S = 0.5
ALL, SEQUENTIAL, HALVES, TEXTS, NONE = DraftUse


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> CoreUse:
    monkeypatch.setattr(core_use, "TargetCores", Cores)
    return CoreUse(Placement("cpu", cores="1"), PassTimes(PassCost(0, 0, 0)), speculator())


def test_without_a_division_the_sidecar_always_drafts() -> None:
    for placed in (None, Placement("cpu"), Placement("cuda:1")):
        use = CoreUse(placed, PassTimes(PassCost(0, 0, 0)), speculator(wanted=False))
        assert use.enter(REQUESTS, RUNTIME) is ALL
        use.enter_prefill(1000)
        use.observe(trees_of(Source.STEP), [[1]] * REQUESTS, 8, 0.1)


def test_a_target_never_takes_the_cpus_of_a_sidecar_that_the_user_pinned_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_use, "TargetCores", Cores)
    use = CoreUse(Placement("cpu", left="1"), PassTimes(PassCost(0, 0, 0)), speculator())
    assert count(use) == use._speculator.totals.target_cpus == 1
    assert use.enter(REQUESTS, RUNTIME) is ALL
    use.enter_prefill(1000)
    assert use.enter(REQUESTS, replace(RUNTIME, enabled=False)) is TEXTS
    assert count(use) == 1
    use.leave()  # there is no sidecar any more
    assert use._speculator.totals.target_cpus == 2


def test_a_long_prompt_takes_all_cpus_and_a_short_one_those_of_the_round(divided: CoreUse) -> None:
    assert divided.enter(REQUESTS, RUNTIME) is ALL
    assert count(divided) == 1
    divided.enter_prefill(LONG - 1)
    assert count(divided) == 1
    divided.enter_prefill(LONG)
    assert count(divided) == 2
    assert divided.enter(REQUESTS, RUNTIME) is ALL
    assert count(divided) == 1


def test_without_drafts_of_the_sidecar_the_target_takes_all_cpus(divided: CoreUse) -> None:
    divided._speculator = speculator(wanted=False)
    assert divided.enter(REQUESTS, RUNTIME) is TEXTS
    assert count(divided) == 2
    divided._speculator = speculator()
    assert divided.enter(REQUESTS, RUNTIME) is ALL
    divided._speculator = speculator(ready=False)
    assert divided.enter(REQUESTS, RUNTIME) is TEXTS


def test_lookups_alone_go_on_only_while_they_pay(divided: CoreUse) -> None:
    """Without a sidecar the rounds are measured too, apart from those with one."""
    divided._speculator = speculator(ready=False)
    kinds = []
    for _ in range(200):
        use = divided.enter(REQUESTS, RUNTIME)
        kinds.append(use)
        seconds = 0.05 if use is NONE else 0.08
        divided.observe(trees_of(Source.PROMPT), [[]] * REQUESTS, REQUESTS, seconds)
    assert set(kinds) == {TEXTS, NONE}
    assert kinds[0] is TEXTS
    assert kinds[-40:].count(NONE) > 30
    assert divided._speculator.totals.trials is divided._alone
    divided._speculator = speculator()
    assert divided.enter(REQUESTS, RUNTIME) is ALL, "the sidecar is back"
    assert divided._speculator.totals.trials is divided._trials


def test_a_sidecar_that_is_not_connected_keeps_its_cpus_for_a_while(divided: CoreUse) -> None:
    absent = divided._speculator = speculator(ready=False)
    assert divided.enter(REQUESTS, RUNTIME) is TEXTS
    absent.sidecar.may_come = True
    kept = 0
    while divided.enter(64, RUNTIME) is ALL:
        divided.observe(trees_of(Source.STEP), [[]] * 64, 64, PASS_S)
        kept += 1
    assert kept == pytest.approx(ABSENT_S / PASS_S, abs=1)
    divided._speculator = speculator()
    assert divided.enter(REQUESTS, RUNTIME) is ALL, "it has connected"
    divided.observe(trees_of(Source.STEP), [[]] * REQUESTS, REQUESTS, PASS_S)
    divided._speculator = absent
    assert divided.enter(64, RUNTIME) is ALL, "it has been lost"


def test_the_silence_of_a_sidecar_without_cpus_does_not_count(divided: CoreUse) -> None:
    sidecar: Any = divided._speculator.sidecar
    assert divided.enter(REQUESTS, RUNTIME) is ALL
    assert not sidecar.starved
    divided.observe(trees_of(Source.STEP), [[]] * REQUESTS, REQUESTS, PASS_S)
    assert divided.enter(64, RUNTIME) is TEXTS
    assert sidecar.starved


@pytest.mark.parametrize(("tokens", "starved"), [(LONG - 1, False), (LONG, True)])
def test_the_sidecar_has_no_cpus_during_a_pass_over_many_prompt_tokens(
    divided: CoreUse, tokens: int, starved: bool
) -> None:
    sidecar: Any = divided._speculator.sidecar
    assert divided.enter(REQUESTS, RUNTIME) is ALL
    divided.observe(trees_of(Source.STEP), [[]] * REQUESTS, REQUESTS, PASS_S)
    divided.enter_prefill(tokens)
    assert sidecar.starved is starved
    divided.enter_prefill(LONG - 1)
    assert sidecar.starved is starved, "it takes the CPUs as they are"
    assert divided.enter(REQUESTS, RUNTIME) is ALL
    assert not sidecar.starved


def test_the_target_has_all_cpus_once_speculation_has_ended(
    divided: CoreUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert divided.enter(REQUESTS, RUNTIME) is ALL
    cores: Any = divided._cores
    leader: Any = Leader.__new__(Leader)
    leader._runtime, leader._core_use = RUNTIME, divided
    monkeypatch.setattr("sglang_qspec.engine.speculation.active", lambda: None)
    for _ in range(2):
        leader._plan(None, Lineup([]))
        assert cores.count == 2
    assert divided._speculator.totals.target_cpus == 2


def test_pass_times_are_learnt_for_each_number_of_cpus(divided: CoreUse) -> None:
    times = divided._times
    for ready, seconds in ((True, 0.2), (False, 0.1)):
        divided._speculator = speculator(ready=ready)
        divided.enter(REQUESTS, RUNTIME)
        for _ in range(50):
            times.observe(REQUESTS, 1, seconds)
    divided._speculator = speculator()
    divided.enter(REQUESTS, RUNTIME)
    assert times.seconds(REQUESTS, 1) == pytest.approx(0.2)
    divided._speculator = speculator(ready=False)
    divided.enter(REQUESTS, RUNTIME)
    assert times.seconds(REQUESTS, 1) == pytest.approx(0.1)


@pytest.mark.parametrize(("source", "tried"), [(Source.STEP, False), (Source.OUTPUT, True)])
def test_all_cpus_are_tried_unless_the_sidecars_drafts_are_worth_more(
    divided: CoreUse, source: Source, tried: bool
) -> None:
    """Each request gets four tokens a pass; a plain pass takes as long, and gives one."""
    found = set()
    for _ in range(60):
        found.add(divided.enter(REQUESTS, RUNTIME))
        divided._times.observe(REQUESTS, 1, PASS_S)
        divided.observe(trees_of(source), [[1, 2, 3]] * REQUESTS, 4 * REQUESTS, PASS_S)
    assert (TEXTS in found) is tried


def test_drafts_are_measured_once_step_drafts_come(divided: CoreUse) -> None:
    trials = divided._speculator.totals.trials
    for source, measured in ((Source.OUTPUT, False), (Source.STEP, True)):
        for _ in range(10):
            assert divided.enter(REQUESTS, RUNTIME) is ALL
            divided._times.observe(REQUESTS, 4, PASS_S)
            divided.observe(trees_of(source), [[1]] * REQUESTS, 2 * REQUESTS, PASS_S)
        assert bool(trials.describe()) is measured


def steps_take(use: CoreUse, seconds: float) -> None:
    """Let the sidecar tell how long a draft step takes."""
    sidecar: Any = use._speculator.sidecar
    sidecar.step_times = [(1.0, seconds)]


@pytest.mark.parametrize("known_on", [1, 2])
@pytest.mark.parametrize(("step_s", "first"), [(0.02, ALL), (1.0, TEXTS)])
def test_cores_go_to_the_sidecar_first_unless_its_steps_are_clearly_too_slow(
    divided: CoreUse, known_on: int, step_s: float, first: DraftUse
) -> None:
    """Passes that were measured with either division tell, such as those of the warm-up."""
    steps_take(divided, step_s)
    divided._times.enter_cores(known_on)
    for _ in range(5):
        divided._times.observe(1, 1, 0.1)
    assert divided.enter(REQUESTS, RUNTIME) is first
    assert divided.enter(REQUESTS, replace(RUNTIME, mode="ahead")) is ALL


@pytest.mark.parametrize(("prompt", "answer", "first"), [(400, 40, TEXTS), (40, 400, ALL)])
def test_the_target_keeps_the_cores_where_the_sidecar_would_mostly_read_prompts(
    divided: CoreUse, prompt: int, answer: int, first: DraftUse
) -> None:
    sidecar: Any = divided._speculator.sidecar
    sidecar.step_times, sidecar.read_seconds = [(1.0, 0.02)], 0.01
    divided._speculator.totals.lengths.arrive(prompt, answer)
    divided._speculator.totals.lengths.end(answer)
    divided._times.enter_cores(1)
    for _ in range(5):
        divided._times.observe(1, 1, 0.1)
    assert divided.enter(REQUESTS, RUNTIME) is first


@pytest.mark.parametrize(("step_s", "first"), [(0.02, ALL), (1.0, TEXTS)])
def test_a_shared_device_drafts_first_unless_its_steps_are_clearly_too_slow(
    step_s: float, first: DraftUse
) -> None:
    placed = Placement("cuda:0", shared=True)
    use = CoreUse(placed, PassTimes(PassCost(0, 0, 0)), speculator())
    assert use.enter(REQUESTS, RUNTIME) is ALL
    for _ in range(5):
        use._times.observe(REQUESTS, 1, 0.1)
    steps_take(use, step_s)
    found = [use.enter(REQUESTS, RUNTIME) for _ in range(FORECAST_EVERY)]
    assert found[-1] is first


BUSY_S, ALONE_S = 0.5, 0.25
"""A pass while the sidecar drafts on the target's device, and while it does not."""


@pytest.mark.parametrize(
    "placed", [Placement("cuda:0", shared=True), Placement("cpu", shares_cpus=True)]
)
@pytest.mark.parametrize(("accepted", "drafts"), [(0.2, False), (3, True)])
def test_drafts_on_a_shared_device_go_on_only_while_they_are_worth_what_they_cost(
    placed: Placement, accepted: float, drafts: bool
) -> None:
    """Each pass over `accepted` draft tokens of a request takes twice the time of one without."""
    use = CoreUse(placed, PassTimes(PassCost(0, 0, 0)), speculator())
    chosen = []
    for round_ in range(400):
        chosen.append(use.enter(REQUESTS, RUNTIME) is ALL)
        seconds = BUSY_S if chosen[-1] else ALONE_S
        use._times.observe(REQUESTS, 1, seconds)
        right = int((round_ + 1) * accepted) - int(round_ * accepted) if chosen[-1] else 0
        nodes = [[1, 2, 3][:right]] * REQUESTS
        use.observe(trees_of(Source.STEP), nodes, (1 + right) * REQUESTS, seconds)
    assert chosen[0], "drafting begins at once"
    assert (sum(chosen[200:]) > 150) is drafts
    assert (sum(chosen[200:]) < 50) is not drafts
    assert use._speculator.totals.target_slowdown == pytest.approx(2.0, rel=0.1)
    use.enter(REQUESTS, replace(RUNTIME, mode="ahead"))
    assert use.lost_seconds(PASS_S) == pytest.approx(PASS_S / 2, rel=0.1)
    use.enter(REQUESTS, replace(RUNTIME, enabled=False))
    assert use.lost_seconds(PASS_S) == 0.0


def test_a_fixed_pipeline_of_step_drafts_always_has_its_sidecar(divided: CoreUse) -> None:
    for mode, kept in (("ahead", True), ("queue", False)):
        found = set()
        for _ in range(60):
            found.add(divided.enter(REQUESTS, replace(RUNTIME, mode=mode)))
            divided._times.observe(REQUESTS, 1, PASS_S)
            divided.observe(trees_of(Source.OUTPUT), [[1]] * REQUESTS, 2 * REQUESTS, PASS_S)
        assert (found == {ALL}) is kept, mode


class RightDrafts:
    """A target whose passes take twice as long with drafts, and then give `tokens` per request."""

    def __init__(self, use: CoreUse, tokens: int) -> None:
        self._use, self._tokens = use, tokens
        self.kept: list[bool] = []
        """Whether the sidecar went on in each round although the round may have had no drafts."""

    def serve(self, rounds: int, settings: RuntimeSettings = RUNTIME) -> list[DraftUse]:
        found = []
        for _ in range(rounds):
            found.append(self._use.enter(REQUESTS, settings))
            self.kept.append(self._use.keeps_drafting)
            drafts = found[-1] is not NONE
            seconds = 0.2 if drafts else 0.1
            nodes = [[1, 2, 3][: self._tokens - 1] if drafts else []] * REQUESTS
            self._use._times.observe(REQUESTS, 4 if drafts else 1, seconds)
            self._use.observe(
                trees_of(Source.OUTPUT), nodes, sum(len(one) + 1 for one in nodes), seconds
            )
        return found


@pytest.mark.parametrize("placed", [None, Placement("cuda:1"), Placement("cpu", left="1")])
@pytest.mark.parametrize(("tokens", "drafts"), [(1, False), (2, False), (3, True)])
def test_rounds_have_drafts_only_while_these_give_more_tokens(
    monkeypatch: pytest.MonkeyPatch, placed: Placement | None, tokens: int, drafts: bool
) -> None:
    """Two tokens in twice the time are not worth it: another use must be clearly better."""
    monkeypatch.setattr(core_use, "TargetCores", Cores)
    use = CoreUse(placed, PassTimes(PassCost(0, 0, 0)), speculator())
    target = RightDrafts(use, tokens)
    assert target.serve(1) == [ALL]
    target.serve(400)
    target.kept.clear()
    later = target.serve(4000)
    most = ALL if drafts or tokens == 2 else NONE
    assert later.count(most) > 3600
    assert {ALL, NONE} == set(later), "the other use is tried"
    # Where plain decoding is only tried, the sidecar goes on. Otherwise it must follow the use: it
    # drafts for a trial of ALL, and stops after it.
    assert {used for used, kept in zip(later, target.kept, strict=True) if kept} <= {NONE}
    assert any(target.kept) is (most is ALL)
    (level,) = use._speculator.totals.describe()["draft_trials"]
    assert level["over_none"] == pytest.approx(tokens / 2, rel=0.05)
    fixed = replace(RUNTIME, fixed_width=True)
    target.serve(3, fixed)
    assert set(target.serve(200, fixed)) == {ALL}


@pytest.mark.parametrize("period", [150, 300, 700])
def test_a_machine_that_changes_its_speed_changes_no_decision(
    divided: CoreUse, period: int
) -> None:
    """Drafts give a fifth more tokens per second, whatever the speed in their last windows was."""
    found = []
    for round_ in range(3000):
        found.append(divided.enter(REQUESTS, RUNTIME))
        drafts = found[-1] is ALL
        seconds = (0.125 if drafts else 0.1) * 2.2 ** math.sin(2 * math.pi * round_ / period)
        right = (1, 0)[round_ % 2] if drafts else 0
        nodes = [[1][:right]] * REQUESTS
        source = Source.STEP if drafts else Source.PROMPT
        divided._times.observe(REQUESTS, 4, seconds)
        divided.observe(trees_of(source), nodes, (1 + right) * REQUESTS, seconds)
    assert found[1000:].count(ALL) > 0.9 * len(found[1000:])


def test_kinds_of_answers_have_trials_and_an_agreement_of_their_own(divided: CoreUse) -> None:
    totals = divided._speculator.totals
    steps = trees_of(Source.STEP)
    for kind, right in ((AnswerKind.GREEDY, 3), (AnswerKind.GRAMMAR, 0)) * 10:
        for _ in range(100):
            seconds = 0.15 if divided.enter(REQUESTS, RUNTIME, kind) is ALL else 0.1
            nodes = [[1, 2, 3][: right if divided._use is ALL else 0]] * REQUESTS
            if divided._use is ALL:
                totals.record(steps, nodes)
            divided._times.observe(REQUESTS, 4, seconds)
            divided.observe(steps, nodes, sum(len(one) + 1 for one in nodes), seconds)
    kinds = {level["kind"]: level["drafts"] for level in totals.describe()["draft_trials"]}
    assert kinds["greedy"] == "all"
    assert kinds["grammar"] != "all"
    totals.kind = AnswerKind.GREEDY
    assert totals.agreement > 0.8
    totals.kind = AnswerKind.GRAMMAR
    assert totals.agreement < 0.3


def test_without_room_for_drafts_the_target_takes_all_cpus(divided: CoreUse) -> None:
    steps_take(divided, 0.001)
    assert divided.enter(1, RUNTIME) is ALL
    assert divided.enter(1, RUNTIME, room=False) is NONE
    assert count(divided) == 2
    divided.observe(DraftTrees.roots(1), [[]], 1, PASS_S)
    assert not divided._speculator.totals.describe()["draft_trials"]


def test_without_speculation_the_target_takes_all_cpus(divided: CoreUse) -> None:
    assert divided.enter(REQUESTS, replace(RUNTIME, enabled=False)) is TEXTS
    assert count(divided) == 2
