"""The division of the cores follows the measured output tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, pairwise

import pytest

from sglang_qspec.policy.core_split import (
    LONGEST_GAP,
    SETTLE_S,
    WARM_UP_S,
    WINDOW_S,
    CoreSplit,
)

PASS_S = 0.1


def serve(
    split: CoreSplit,
    rate: Callable[[bool], float],
    seconds: float,
    *,
    requests: int = 2,
    drafted: float = 0.0,
    plain_rate: float = 10.0,
) -> Iterator[bool]:
    """Divisions of the rounds of a load with this `rate` in tokens/s by division.

    `drafted` is the share of the tokens that the sidecar drafts while it has its cores.
    """
    for _ in range(round(seconds / PASS_S)):
        division = split.choose(requests)
        tokens = round(rate(division) * PASS_S)
        split.observe(tokens, round(drafted * tokens) if division else 0, PASS_S, plain_rate)
        yield division


def share(divisions: Iterator[bool]) -> float:
    """Share of the rounds in which the sidecar had its cores."""
    found = list(divisions)
    return sum(found) / len(found)


def test_the_sidecar_keeps_its_cores_while_they_give_more_tokens() -> None:
    split = CoreSplit(2.0)
    assert share(serve(split, lambda own: 150.0 if own else 100.0, 100)) > 0.7
    assert share(serve(split, lambda own: 150.0 if own else 100.0, 400)) > 0.95


def test_the_target_takes_all_cores_where_drafts_do_not_pay() -> None:
    split = CoreSplit(2.0)
    list(serve(split, lambda own: 50.0 if own else 100.0, 20))
    assert share(serve(split, lambda own: 50.0 if own else 100.0, 400)) < 0.05


def test_few_requests_begin_with_cores_for_the_sidecar_and_many_with_all_cores() -> None:
    assert share(serve(CoreSplit(2.0), lambda _: 100.0, WINDOW_S, requests=3)) == 1.0
    split = CoreSplit(2.0)
    assert share(serve(split, lambda own: 150.0 if own else 100.0, WINDOW_S, requests=4)) < 0.5
    list(serve(split, lambda own: 150.0 if own else 100.0, 30, requests=4))
    assert share(serve(split, lambda own: 150.0 if own else 100.0, 100, requests=4)) > 0.9


def test_more_requests_begin_with_cores_for_the_sidecar_if_the_target_keeps_most_cores() -> None:
    assert share(serve(CoreSplit(4 / 3), lambda _: 100.0, WINDOW_S, requests=8)) == 1.0
    assert share(serve(CoreSplit(4 / 3), lambda _: 100.0, WINDOW_S, requests=16)) < 0.5


@pytest.mark.parametrize(("measured", "begun", "own"), [(2, 8, False), (16, 8, True)])
def test_batches_begin_with_the_decision_of_smaller_or_larger_ones(
    measured: int, begun: int, own: bool
) -> None:
    def rate(division: bool) -> float:
        return 150.0 if division == own else 100.0

    split = CoreSplit(2.0)
    list(serve(split, rate, 30, requests=measured))
    assert share(serve(split, rate, WINDOW_S, requests=begun)) == own


def test_a_clearly_slower_division_is_tried_for_a_third_of_a_window() -> None:
    def tried(slow: float) -> float:
        split = CoreSplit(2.0)
        found = list(serve(split, lambda own: slow if own else 100.0, 60, requests=8))
        lengths = [len(list(same)) for own, same in groupby(found) if own]
        assert lengths
        return max(lengths) * PASS_S

    assert tried(90.0) == pytest.approx(WARM_UP_S[True] + WINDOW_S, abs=2 * PASS_S)
    assert tried(50.0) == pytest.approx(WARM_UP_S[True] + WINDOW_S / 3, abs=2 * PASS_S)


def test_a_change_of_the_load_is_noticed() -> None:
    split = CoreSplit(2.0)
    list(serve(split, lambda own: 50.0 if own else 100.0, 100))
    longest = LONGEST_GAP * WINDOW_S + 2 * (WARM_UP_S[True] + WINDOW_S)
    list(serve(split, lambda own: 200.0 if own else 100.0, 2 * longest))
    assert share(serve(split, lambda own: 200.0 if own else 100.0, 100)) > 0.9


def test_a_trial_that_cannot_win_is_left_out() -> None:
    """The drafts give three times the tokens of plain decoding, and two cores at most twice."""
    split = CoreSplit(2.0)
    assert share(serve(split, lambda _: 90.0, 100, drafted=0.8, plain_rate=30.0)) == 1.0
    # Tokens from lookups would come on all cores too.
    assert share(serve(CoreSplit(2.0), lambda _: 90.0, 100, drafted=0.1, plain_rate=30.0)) < 1.0


def test_small_and_large_batches_have_decisions_of_their_own() -> None:
    split = CoreSplit(2.0)
    for _ in range(20):
        list(serve(split, lambda own: 150.0 if own else 100.0, 10, requests=2))
        list(serve(split, lambda own: 50.0 if own else 100.0, 10, requests=32))
    assert share(serve(split, lambda own: 150.0 if own else 100.0, 10, requests=2)) > 0.8
    assert share(serve(split, lambda own: 50.0 if own else 100.0, 10, requests=32)) < 0.2


def test_the_cores_settle_before_they_change_hands_again() -> None:
    split = CoreSplit(2.0)
    list(serve(split, lambda own: 150.0 if own else 100.0, 60, requests=2))
    list(serve(split, lambda own: 50.0 if own else 100.0, 60, requests=32))
    divisions: list[bool] = []
    for number in range(200):
        divisions += serve(split, lambda _: 100.0, PASS_S, requests=(2, 32)[number % 2])
    changes = sum(a != b for a, b in pairwise(divisions))
    assert changes <= len(divisions) * PASS_S / SETTLE_S + 1


def test_a_round_that_keeps_the_other_division_does_not_count() -> None:
    split = CoreSplit(2.0)
    list(serve(split, lambda own: 150.0 if own else 100.0, 60, requests=3))
    list(serve(split, lambda own: 50.0 if own else 100.0, 60, requests=32))
    before = split._levels[2].rates[True]
    seconds = 0.6 * SETTLE_S
    for _ in range(100):
        for requests in (32, 3, 3):
            if split.choose(requests):
                split.observe(round(150 * seconds), 0, seconds, 10.0)
            else:  # a small batch is slow without drafts
                split.observe(1, 0, seconds, 10.0)
    assert split._levels[2].rates[True] == pytest.approx(before)


def test_a_long_pass_with_the_other_division_does_not_count() -> None:
    split = CoreSplit(2.0)
    split.choose(2)
    split.observe(1, 0, PASS_S, 10.0)
    assert not split.choose(32)
    split.observe(1, 0, 0.8 * SETTLE_S, 10.0)
    assert not split.choose(2), "the cores settle"
    split.observe(1, 0, WARM_UP_S[False] + WINDOW_S, 10.0)
    assert not split._levels[1].rates


def test_a_target_that_gains_no_cores_leaves_the_sidecar_its_own() -> None:
    assert share(serve(CoreSplit(1.0), lambda _: 100.0, WINDOW_S, requests=64)) == 1.0


@pytest.mark.parametrize("fast", [True, False])
def test_the_first_passes_after_a_change_do_not_count(fast: bool) -> None:
    split = CoreSplit(2.0)
    last, since = True, 0.0

    def rate(own: bool) -> float:
        """The drafts need half a second after a change; then they are the better division."""
        nonlocal last, since
        since = 0.0 if own != last else since + PASS_S
        last = own
        return (150.0 if since > 0.5 else 10.0) if own else (100.0 if fast else 90.0)

    list(serve(split, rate, 100))
    assert share(serve(split, rate, 100)) > 0.9
