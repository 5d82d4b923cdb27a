"""Pipelines against each other and their bound, and the targets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmark.parallel.comparisons import Comparison, auto_speedups, balanced, compare
from benchmark.parallel.journal import Entry
from benchmark.parallel.measures import Results
from benchmark.parallel.targets import Target, targets
from test.benchmark.parallel.cells import block_entries, entry_of


def one(verify_s: float, draft_s: float, ratio: float = 1.5) -> Comparison:
    return Comparison(4, 4, "halves", ratio, 1.4, verify_s, draft_s)


@pytest.mark.parametrize(
    ("verify_s", "draft_s", "bound"), [(0.03, 0.03, 2.0), (0.03, 0.01, 4 / 3), (0.01, 0.04, 1.25)]
)
def test_hiding_all_drafting_gives_at_most_the_bound(
    verify_s: float, draft_s: float, bound: float
) -> None:
    assert one(verify_s, draft_s).bound == pytest.approx(bound)
    assert one(verify_s, draft_s, ratio=bound / 2).of_bound == pytest.approx(0.5)


def test_the_balanced_one_is_where_drafting_and_verifying_take_most_nearly_as_long() -> None:
    longer_drafts, longer_passes, near = one(0.01, 0.04), one(0.04, 0.02), one(0.03, 0.02)
    assert balanced([longer_drafts, longer_passes, near]) is near
    assert balanced([]) is None


def test_both_comparisons_are_made_with_the_times_of_drafting_in_sequence() -> None:
    found = compare(Results(block_entries()))
    (paper,) = found.paper
    assert paper.ratio == pytest.approx(30 / 16)
    assert paper.bound == pytest.approx(2.0)
    assert paper.whole_ratio < paper.ratio
    assert {c.pipeline: round(c.ratio, 3) for c in found.same_in_flight} == {
        "halves": 1.5,
        "ahead": 1.35,
    }
    assert [c.pipeline for c in found.best] == ["halves"]


def test_the_choice_is_compared_with_the_best_that_it_could_have_taken() -> None:
    entries = [e for e in block_entries() if e.config != "queue"]
    faster_queue = entry_of("queue", decoded_per_s=60.0)
    auto, auto_step = compare(Results([*entries, faster_queue])).choices
    assert (auto.config, auto.best) == ("auto", "queue")
    assert auto.ratio == pytest.approx(29.4 / 60)
    assert (auto_step.config, auto_step.best) == ("auto-step", "halves")
    assert auto_step.ratio == pytest.approx(1.0)


def test_comparisons_lack_what_was_not_served() -> None:
    found = compare(Results([entry_of("none"), entry_of("halves"), entry_of("auto")]))
    assert (found.paper, found.same_in_flight) == ((), ())
    assert [c.best for c in found.choices] == ["halves"]


def test_auto_counts_at_the_largest_k_with_its_prompts_and_at_equal_hardware() -> None:
    entries = [entry_of("none", in_flight=2, k=8), entry_of("none-equal", in_flight=2, k=8)]
    entries += [
        entry_of("auto", in_flight=2, k=k, decoded_per_s=speed) for k, speed in ((1, 99), (8, 30))
    ]
    speedup, equal = auto_speedups(Results(entries))[2]
    assert speedup == pytest.approx((60 / 10 + 0.5) / (60 / 30 + 0.5))
    assert equal == pytest.approx((60 / 15 + 0.5) / (60 / 30 + 0.5))


def judged(entries: Sequence[Entry]) -> list[Target]:
    results = Results(entries)
    return targets(results, compare(results))


def test_targets_that_are_reached_are_met() -> None:
    entries = [e for level in (2, 4, 8) for e in block_entries(in_flight=level)]
    fast = [e for e in entries if e.config not in ("halves", "auto")]
    for level in (2, 4, 8):
        fast += [
            entry_of("halves", in_flight=level, decoded_per_s=36.0),
            entry_of("auto", in_flight=level, decoded_per_s=36.0),
        ]
    met = {target.goal: target.met for target in judged(fast)}
    # 36 / 16 is above the bound; 36 / 20 is 90 % of it.
    assert all(met.values())


def test_targets_that_are_missed_say_where() -> None:
    paper, of_bound, nearly, hidden, choice, *speedups = judged(block_entries())
    assert (paper.met, of_bound.met, nearly.met, hidden.met, choice.met) == (
        *(False, False, True, True),
        True,
    )
    assert paper.found.startswith("halves, k = 4, 4 in flight: 1.88, 94% of 2.00")
    assert "1 of 1 are not: halves, k = 4, 4 in flight: 1.50, 75% of 2.00" in of_bound.found
    assert [target.met for target in speedups] == [None, True, None]


def test_drafting_must_be_hidden_only_where_it_takes_no_longer_than_verifying() -> None:
    waits = [entry_of(name, waited_s=0.015) for name in ("halves", "sequential")]
    slow = [entry_of(name, draft_s=0.05, waited_s=0.02) for name in ("halves", "ahead")]
    assert judged(waits)[3].met is False
    assert "halves, k = 4, 4 in flight: 50%" in judged(waits)[3].found
    assert judged(slow)[3].met is None


def test_a_single_request_has_no_part_in_what_is_asked_of_batches() -> None:
    entries = [entry_of(name, in_flight=1) for name in ("sequential", "ahead")]
    assert [target.met for target in judged(entries)[1:3]] == [None, None]
    assert len(compare(Results(entries)).same_in_flight) == 1


def test_nothing_measured_is_neither_met_nor_missed() -> None:
    assert {target.met for target in judged([])} == {None}
