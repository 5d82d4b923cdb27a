"""The drafts of a round follow the measured output tokens per second."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest

from sglang_qspec.policy import AnswerKind, DraftTrials, DraftUse
from sglang_qspec.policy.draft_trials import (
    PATIENCE_S,
    SETTLE_S,
    WARM_UP_S,
)
from sglang_qspec.policy.trial_level import FEWEST, LONGEST_GAP, LOSS, WINDOW_S
from test.policy.trial_loads import (
    ALL,
    GRAMMAR,
    GREEDY,
    MIXED,
    NONE,
    PASS_S,
    SAMPLED,
    TEXTS,
    rates,
    serve,
    share,
)


def test_the_sidecar_keeps_its_cores_while_they_give_more_tokens() -> None:
    trials = DraftTrials(2.0)
    assert share(serve(trials, rates(150, 100), 100)) > 0.7
    assert share(serve(trials, rates(150, 100), 400)) > 0.95


def test_the_target_takes_all_cores_where_drafts_do_not_pay() -> None:
    trials = DraftTrials(2.0)
    list(serve(trials, rates(50, 100), 20))
    assert share(serve(trials, rates(50, 100), 400)) < 0.05


@pytest.mark.parametrize("ratio", [None, 2.0])
@pytest.mark.parametrize("requests", [1, 16, 64])
def test_no_drafts_are_used_where_plain_decoding_gives_more_tokens(
    ratio: float | None, requests: int
) -> None:
    """Whatever the predictions say: here they say that drafts are worth 1.5 times."""
    trials = DraftTrials(ratio)
    load = rates(80, 90, 100)
    list(serve(trials, load, 60, requests=requests, plain_rate=60.0))
    assert share(serve(trials, load, 400, requests=requests, plain_rate=60.0), NONE) > 0.93


@pytest.mark.parametrize("worth", [1.05, 1.2, 2.0, 4.0])
@pytest.mark.parametrize("known", [0.5, 1.0, 2.0])
def test_trials_of_plain_decoding_lose_less_than_one_percent(worth: float, known: float) -> None:
    """Whatever is predicted of plain decoding, after its first trial."""
    trials, load = DraftTrials(), rates(100 * worth, 0, 100)
    list(serve(trials, load, 60, plain_rate=100 * known))
    found = share(serve(trials, load, 2000, plain_rate=100 * known), NONE)
    assert found > 0.0
    assert found * (1.0 - 1.0 / worth) < LOSS


def test_long_passes_have_longer_windows_and_fewer_trials() -> None:
    """A pass takes a second, so a window of plain decoding takes eight."""
    trials = DraftTrials()
    uses = []
    for _ in range(1000):
        uses.append(trials.choose(2))
        trials.observe({ALL: 20, NONE: 18}[uses[-1]], 0, 1.0, 18.0)
    lengths = [len(list(same)) for use, same in groupby(uses) if use is NONE]
    assert set(lengths) == {FEWEST}
    assert 0.1 * sum(lengths) < LOSS * len(uses)


def test_drafts_that_pay_again_come_back() -> None:
    trials = DraftTrials()
    list(serve(trials, rates(90, 0, 100), 200))
    longest = LONGEST_GAP * WINDOW_S[ALL] + 2 * (WARM_UP_S[ALL] + WINDOW_S[ALL])
    list(serve(trials, rates(200, 0, 100), 2 * longest))
    assert share(serve(trials, rates(200, 0, 100), 100)) > 0.95


def test_a_use_that_was_faster_before_is_tried_soon_when_the_present_one_slows_down() -> None:
    """The texts have changed: plain decoding was 1.1 times as fast, now drafts are twice so."""
    trials = DraftTrials()
    list(serve(trials, rates(200, 0, 220), 200))
    changed = list(serve(trials, rates(200, 0, 100), 10))
    assert share(iter(changed[-10:])) == 1.0
    # Where nothing else is known to be faster, the next trial comes much later.
    other = DraftTrials()
    list(serve(other, rates(90, 0, 220), 200))
    assert share(serve(other, rates(200, 0, 100), 10)) == 0.0


def test_a_batch_that_shrinks_for_a_moment_leaves_the_target_its_cores() -> None:
    """As at the end of a load; the sidecar would read the texts until the requests have ended."""
    trials = DraftTrials(2.0)
    list(serve(trials, rates(150, 100), 60, requests=2))
    for _ in range(5):
        assert TEXTS in set(serve(trials, rates(50, 100), 3, requests=16))
        assert share(serve(trials, rates(150, 100), PATIENCE_S - PASS_S, requests=2), TEXTS) == 1.0
    assert share(serve(trials, rates(150, 100), 3, requests=2)) > 0.9
    # A sidecar with a device of its own takes nothing from the target.
    other = DraftTrials(None)
    list(serve(other, rates(95, 0, 100), 60, requests=16))
    assert share(serve(other, rates(150, 0, 100), 0.5, requests=2)) > 0.0


def test_new_requests_have_the_drafts_of_the_sidecar_at_once() -> None:
    """A new load is not the end of the last one, although its batch is smaller."""
    trials = DraftTrials(2.0)
    list(serve(trials, rates(150, 100), 60, requests=2))
    list(serve(trials, rates(50, 100), 60, requests=16))
    trials.arrive()
    assert share(serve(trials, rates(150, 100), PATIENCE_S, requests=2)) == 1.0


def test_kinds_of_answers_have_decisions_of_their_own() -> None:
    """The draft model is right about prose, and lookups are about answers by a schema."""
    trials = DraftTrials(2.0)
    loads = {GREEDY: rates(150, 100, 90), GRAMMAR: rates(90, 130, 90), SAMPLED: rates(80, 90, 100)}
    for _ in range(20):
        for kind, load in loads.items():
            list(serve(trials, load, 10, kind=kind))
    for kind, best in ((GREEDY, ALL), (GRAMMAR, TEXTS), (SAMPLED, NONE)):
        assert share(serve(trials, loads[kind], 10, kind=kind), best) > 0.8
    assert [level["kind"] for level in trials.describe()] == ["grammar", "greedy", "sampled"]


@pytest.mark.parametrize(("begun", "first"), [(GRAMMAR, TEXTS), (GREEDY, ALL)])
def test_batches_begin_with_the_decision_of_other_sizes_of_their_kind(
    begun: AnswerKind, first: DraftUse
) -> None:
    trials = DraftTrials(2.0)
    list(serve(trials, rates(150, 100), 60, requests=4, kind=GREEDY))
    list(serve(trials, rates(90, 130), 60, requests=8, kind=GRAMMAR))
    trials.arrive()
    assert share(serve(trials, rates(100, 100), 2.0, requests=2, kind=begun), first) > 0.8


def test_one_lucky_trial_does_not_outweigh_what_was_measured_before_it() -> None:
    """Lookups come in bursts."""
    trials = DraftTrials(2.0)
    list(serve(trials, rates(130, 100), 200))
    lucky = rates(130, 155)
    while TEXTS not in set(serve(trials, rates(130, 100), PASS_S)):
        pass
    list(serve(trials, lucky, WARM_UP_S[TEXTS] + WINDOW_S[TEXTS]))
    assert share(serve(trials, rates(130, 100), 5)) == 1.0


def test_what_drafts_are_worth_is_told_for_each_batch_size() -> None:
    trials = DraftTrials()
    list(serve(trials, rates(150, 0, 100), 300, requests=3))
    list(serve(trials, rates(90, 0, 100), 300, requests=20))
    few, many = trials.describe()
    assert (few["requests"], few["drafts"]) == ([2, 3], "all")
    assert few["over_none"] == pytest.approx(1.5)
    assert (many["requests"], many["drafts"]) == ([16, 31], "none")
    assert many["over_none"] == pytest.approx(0.9)
    least, most = many["over_none_range"]
    assert least <= many["over_none"] <= most
    assert many["comparisons"] > 0


def test_plain_rounds_can_be_forbidden() -> None:
    trials, load = DraftTrials(2.0), {ALL: 50, TEXTS: 90, NONE: 100}
    for seconds in (0.0, 6.9, 60.0):  # at once, in the middle of a trial, and after a decision
        for _ in range(round(seconds / PASS_S)):
            trials.observe(round(load[trials.choose(2)] * PASS_S), 0, PASS_S, 10.0)
        [trials.choose(2, plain=False) for _ in range(3)]
        trials.skip(SETTLE_S)
        uses = set()
        for _ in range(600):
            uses.add(use := trials.choose(2, plain=False))
            trials.observe(round(load[use] * PASS_S), 0, PASS_S, 10.0)
        assert uses <= {ALL, TEXTS}
        trials = DraftTrials(2.0)


def test_few_requests_begin_with_cores_for_the_sidecar_and_many_with_all_cores() -> None:
    assert share(serve(DraftTrials(2.0), rates(100, 100), 1.5, requests=3)) == 1.0
    trials = DraftTrials(2.0)
    assert share(serve(trials, rates(150, 100), 1.5, requests=4)) < 0.5
    list(serve(trials, rates(150, 100), 30, requests=4))
    assert share(serve(trials, rates(150, 100), 100, requests=4)) > 0.9


def test_more_requests_begin_with_cores_for_the_sidecar_if_the_target_keeps_most_cores() -> None:
    assert share(serve(DraftTrials(4 / 3), rates(100, 100), 1.5, requests=8)) == 1.0
    assert share(serve(DraftTrials(4 / 3), rates(100, 100), 1.5, requests=16)) < 0.5


@pytest.mark.parametrize(
    ("measured", "begun", "best"), [(2, 8, TEXTS), (16, 8, ALL), (2, 8, NONE), (4, 32, NONE)]
)
def test_batches_begin_with_the_decision_of_smaller_or_larger_ones(
    measured: int, begun: int, best: DraftUse
) -> None:
    load = {use: 150.0 if use is best else 100.0 for use in DraftUse}
    trials = DraftTrials(2.0)
    list(serve(trials, load, 60, requests=measured))
    assert share(serve(trials, load, 1.5, requests=begun), best) == 1.0


def test_a_clearly_slower_use_is_tried_for_a_third_of_a_window() -> None:
    def tried(slow: float) -> float:
        trials = DraftTrials(2.0)
        found = list(serve(trials, rates(slow, 100), 60, requests=8))
        lengths = [len(list(same)) for use, same in groupby(found) if use is ALL]
        assert lengths
        return max(lengths) * PASS_S

    assert tried(90.0) == pytest.approx(WARM_UP_S[ALL] + WINDOW_S[ALL], abs=2 * PASS_S)
    assert tried(50.0) == pytest.approx(WARM_UP_S[ALL] + WINDOW_S[ALL] / 3, abs=2 * PASS_S)


def test_a_trial_that_cannot_win_is_left_out() -> None:
    """The drafts give three times the tokens of plain decoding, and two cores at most twice."""
    trials = DraftTrials(2.0)
    load = rates(90, 90, 30)
    assert share(serve(trials, load, 100, drafted=0.8, plain_rate=30.0), TEXTS) == 0.0
    # Tokens from lookups would come on all cores too.
    trials = DraftTrials(2.0)
    assert share(serve(trials, load, 100, drafted=0.1, plain_rate=30.0), TEXTS) > 0.0


def test_small_and_large_batches_have_decisions_of_their_own() -> None:
    trials = DraftTrials(2.0)
    for _ in range(20):
        list(serve(trials, rates(150, 100), 10, requests=2))
        list(serve(trials, rates(50, 100), 10, requests=32))
    assert share(serve(trials, rates(150, 100), 10, requests=2)) > 0.8
    assert share(serve(trials, rates(50, 100), 10, requests=32)) < 0.2


def test_the_cores_settle_before_they_change_hands_again() -> None:
    trials = DraftTrials(2.0)
    list(serve(trials, rates(150, 100), 60, requests=2))
    list(serve(trials, rates(50, 100), 60, requests=32))
    uses: list[DraftUse] = []
    for number in range(200):
        uses += serve(trials, rates(100, 100), PASS_S, requests=(2, 32)[number % 2])
    changes = sum(a != b for a, b in pairwise(uses))
    assert changes <= len(uses) * PASS_S / SETTLE_S + 1


def test_a_round_that_keeps_the_other_use_does_not_count() -> None:
    trials = DraftTrials(2.0)
    list(serve(trials, rates(150, 100), 60, requests=3))
    list(serve(trials, rates(50, 100), 60, requests=32))
    before = trials._levels[MIXED, 2].rates[ALL]
    seconds = 0.6 * SETTLE_S
    for _ in range(100):
        for requests in (32, 3, 3):
            if trials.choose(requests) is ALL:
                trials.observe(round(150 * seconds), 0, seconds, 10.0)
            else:  # a small batch is slow without drafts
                trials.observe(1, 0, seconds, 10.0)
    assert trials._levels[MIXED, 2].rates[ALL] == pytest.approx(before)


def test_a_long_pass_with_the_other_use_does_not_count() -> None:
    trials = DraftTrials(2.0)
    trials.choose(2)
    trials.observe(1, 0, PASS_S, 10.0)
    assert trials.choose(32) is TEXTS
    trials.observe(1, 0, 0.8 * SETTLE_S, 10.0)
    assert trials.choose(2) is TEXTS, "the cores settle"
    trials.observe(1, 0, WARM_UP_S[TEXTS] + WINDOW_S[TEXTS], 10.0)
    assert not trials._levels[MIXED, 2].measured


def test_a_target_that_gains_no_cores_leaves_the_sidecar_its_own() -> None:
    assert share(serve(DraftTrials(1.0), rates(100, 100), 1.5, requests=64)) == 1.0


@pytest.mark.parametrize("fast", [True, False])
def test_the_first_passes_after_a_change_do_not_count(fast: bool) -> None:
    trials = DraftTrials(2.0)
    last, since = ALL, 0.0

    def rate(use: DraftUse) -> float:
        """The drafts need half a second after a change; then they are the better use."""
        nonlocal last, since
        since = 0.0 if use != last else since + PASS_S
        last = use
        if use is not ALL:
            return (100.0 if fast else 90.0) if use is TEXTS else 10.0
        return 150.0 if since > 0.5 else 10.0

    list(serve(trials, rate, 100))
    assert share(serve(trials, rate, 100)) > 0.9


@pytest.mark.parametrize("first_draft_s", [0.0, 4.0])
def test_drafts_are_measured_from_the_first_one_on(first_draft_s: float) -> None:
    """A sidecar with a large model reads the texts for seconds before it drafts."""
    trials, now = DraftTrials(2.0), 0.0
    while not trials._levels[MIXED, 1].measured:
        assert trials.choose(1) is ALL
        drafts = now >= first_draft_s
        trials.observe(15 if drafts else 1, 0, PASS_S, 10.0, has_steps=drafts)
        now += PASS_S
    assert trials._levels[MIXED, 1].rates[ALL] == pytest.approx(150.0)
    assert now < first_draft_s + WINDOW_S[ALL] + 3 * PASS_S


def test_a_sidecar_that_never_drafts_in_time_is_measured_too_and_seldom() -> None:
    """A trial lasts as long as the wait for its drafts, so fewer trials lose one percent."""
    trials, load = DraftTrials(2.0), {ALL: 30, TEXTS: 100, NONE: 10}
    uses = []
    for _ in range(30_000):
        uses.append(trials.choose(1))
        trials.observe(round(load[uses[-1]] * PASS_S), 0, PASS_S, 10.0, has_steps=False)
    assert trials._levels[MIXED, 1].rates[ALL] == pytest.approx(30.0)
    assert 0.0 < 0.7 * share(iter(uses[1000:])) < LOSS
