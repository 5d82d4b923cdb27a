"""Trials that something else asks for: a predicted pipeline, and texts that repeat themselves."""

from __future__ import annotations

from itertools import groupby

import pytest

from sglang_qspec.policy import DraftTrials, DraftUse
from sglang_qspec.policy.draft_trials import PROMISE_EVERY, WARM_UP_S
from sglang_qspec.policy.trial_level import FEWEST, LOSS, WINDOW_S
from test.policy.trial_loads import (
    ALL,
    HALVES,
    NONE,
    PASS_S,
    SEQUENTIAL,
    TEXTS,
    rates,
    serve,
    share,
)


@pytest.mark.parametrize("ratio", [None, 2.0])
@pytest.mark.parametrize("proposed", [SEQUENTIAL, HALVES])
@pytest.mark.parametrize(("rate", "pays"), [(80, False), (100, False), (130, True)])
def test_a_proposed_pipeline_is_kept_only_if_it_gives_more_tokens(
    ratio: float | None, proposed: DraftUse, rate: float, *, pays: bool
) -> None:
    trials = DraftTrials(ratio)
    load = dict.fromkeys(DraftUse, 50.0) | {ALL: 100.0, proposed: rate}
    begun = list(serve(trials, load, 60, requests=4, proposed=proposed))
    assert begun.count(proposed) > 0
    found = share(serve(trials, load, 400, requests=4, proposed=proposed), proposed)
    assert found > 0.9 if pays else found * (1 - rate / 100) < LOSS
    (level,) = trials.describe()
    assert level["drafts"] == (proposed.value if pays else "all")
    assert level["tokens_per_s"][proposed.value] == pytest.approx(rate, rel=0.01)


def test_a_pipeline_that_is_not_proposed_is_not_tried() -> None:
    load = dict.fromkeys(DraftUse, 300.0) | {ALL: 100.0, TEXTS: 50.0, NONE: 50.0}
    assert set(serve(DraftTrials(2.0), load, 400)) == {ALL, TEXTS, NONE}
    uses = set(serve(DraftTrials(2.0), load, 400, proposed=HALVES))
    assert HALVES in uses
    assert SEQUENTIAL not in uses


def test_a_pipeline_that_was_faster_ends_when_it_is_slower() -> None:
    """It is not proposed any more, but stays until the first pipeline is measured to be faster."""
    trials = DraftTrials(2.0)
    load = dict.fromkeys(DraftUse, 50.0) | {ALL: 100.0, HALVES: 150.0}
    list(serve(trials, load, 100, proposed=HALVES))
    assert share(serve(trials, load, 100), HALVES) > 0.9
    load[HALVES] = 60.0
    list(serve(trials, load, 60))
    assert share(serve(trials, load, 60)) > 0.8


def test_a_new_size_begins_in_the_first_pipeline() -> None:
    """With the cores for the sidecar, as the other pipeline was worth them."""
    trials = DraftTrials(2.0)
    load = dict.fromkeys(DraftUse, 60.0) | {ALL: 50.0, HALVES: 150.0, TEXTS: 80.0}
    assert share(serve(trials, load, 200, requests=4, proposed=HALVES), HALVES) > 0.5
    trials.arrive()
    assert share(serve(trials, load, 1.0, requests=16, proposed=HALVES)) > 0.9


def test_a_change_of_the_pipeline_alone_takes_no_long_warm_up() -> None:
    """The sidecar has read the running texts."""
    trials = DraftTrials(2.0)
    load = dict.fromkeys(DraftUse, 50.0) | {ALL: 100.0}
    uses = serve(trials, load, 60, requests=2, proposed=HALVES)
    trial = [len(list(same)) * PASS_S for use, same in groupby(uses) if use is HALVES]
    slower = WARM_UP_S[HALVES] + WINDOW_S[HALVES] / 3
    assert trial[0] == pytest.approx(slower, abs=FEWEST * PASS_S)


@pytest.mark.parametrize("ratio", [None, 2.0])
def test_texts_that_repeat_what_would_have_been_drafted_have_drafts_soon(
    ratio: float | None,
) -> None:
    """As the answers of an earlier run do, that come as guesses after other requests."""
    trials = DraftTrials(ratio)
    list(serve(trials, rates(80, 80, 100), 400))
    repeated = rates(300, 300, 100)
    assert share(serve(trials, repeated, 20, promised=True), NONE) < 0.2
    # Without the promise the next trial comes much later.
    other = DraftTrials()
    list(serve(other, rates(80, 80, 100), 400))
    assert share(serve(other, repeated, 20), NONE) == 1.0


@pytest.mark.parametrize("ratio", [None, 2.0])
def test_promises_that_are_not_kept_lose_little(ratio: float | None) -> None:
    """Matches are long, but the passes that verify drafts cost more than these save."""
    trials, load = DraftTrials(ratio), rates(80, 80, 100)
    list(serve(trials, load, 60, promised=True))
    assert share(serve(trials, load, 400, promised=True), NONE) > 0.95


def test_promises_are_asked_for_in_some_rounds_without_drafts() -> None:
    trials, asked = DraftTrials(), []

    def promised() -> bool:
        asked.append(uses[-1])
        return False

    uses = [ALL]
    for _ in range(2000):
        uses.append(trials.choose(2, promised=promised))
        trials.observe(8 if uses[-1] is ALL else 10, 0, PASS_S, 10.0)
    assert set(asked) == {NONE}
    assert len(asked) == pytest.approx(uses.count(NONE) / PROMISE_EVERY, rel=0.1)
