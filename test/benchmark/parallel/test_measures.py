"""The figures of a cell, and ratios between cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmark.harness.run import Gap
from benchmark.parallel.measures import Point, Results, streamed
from test.benchmark.parallel.cells import (
    REQUESTS,
    TOKENS,
    block_runs,
    cell_of,
    counters_of,
    one_run,
    run_of,
    streamed_run,
    together,
)


def test_times_are_for_each_verify_pass() -> None:
    found = run_of(counters=counters_of(verify_s=0.03, draft_s=0.02, waited_s=0.005))
    assert found.verify_s == pytest.approx(0.03)
    assert found.draft_s == pytest.approx(0.02)
    assert found.waited_s == pytest.approx(0.005)
    assert found.hidden_share == pytest.approx(0.75)
    assert (found.batch, found.width) == (3, 5)


def test_a_wait_longer_than_the_drafting_hides_nothing() -> None:
    assert (run_of(counters=counters_of(draft_s=0.01, waited_s=0.02))).hidden_share == 0


def test_without_a_sidecar_there_are_no_draft_times() -> None:
    found = run_of(passes=TOKENS - 1)
    assert found.accept_len == 1.0
    assert (found.verify_s, found.draft_s, found.hidden_share) == (None, None, None)


def test_a_pipeline_that_never_drafts_has_no_hidden_share() -> None:
    found = run_of(counters=counters_of(draft_s=0.0))
    assert (found.draft_s, found.hidden_share) == (0.0, None)


def test_the_accept_length_leaves_out_the_prompts_token() -> None:
    assert (run_of()).accept_len == pytest.approx(2.0)


def test_tokens_of_one_streamed_chunk_share_its_gap() -> None:
    found = streamed([Gap(0.04, 4), Gap(0.06, 1)])
    assert found.itl_mean == pytest.approx(0.02)
    assert found.itl_p99 == found.chunk_gap_p99 == pytest.approx(0.06)


def test_a_ratio_is_computed_within_each_round() -> None:
    speeds = {1: (10.0, 5.0), 2: (100.0, 100.0), 3: (30.0, 10.0)}
    runs = (
        one_run(name, number=number, decoded_per_s=speed)
        for number, pair in speeds.items()
        for name, speed in zip(("halves", "sequential"), pair, strict=True)
    )
    results = Results(together(*runs))
    halves, sequential = (Point(4, 4, name) for name in ("halves", "sequential"))
    assert str(results.decode_ratio(halves, sequential)) == "2.00 (1.00 to 3.00)"
    assert results.decode_ratio(halves, Point(4, 4, "ahead")) is None


def test_a_ratio_needs_a_round_with_both_sides() -> None:
    results = Results(together(one_run("halves"), one_run("sequential", number=2)))
    assert results.decode_ratio(Point(4, 4, "halves"), Point(4, 4, "sequential")) is None


def test_rows_are_compared_with_no_speculation_at_the_same_number_in_flight() -> None:
    rows = {row.point.config: row for row in Results(block_runs(in_flight=8)).rows()}
    halves = rows["halves"]
    tokens, decoded = REQUESTS * TOKENS, REQUESTS * (TOKENS - 1)
    assert halves.figures.tokens_per_s == pytest.approx(tokens / (decoded / 30 + 0.5))
    assert halves.speedup is not None
    assert halves.equal_hardware is not None
    assert halves.speedup.median == pytest.approx((decoded / 10 + 0.5) / (decoded / 30 + 0.5))
    assert halves.equal_hardware.median == pytest.approx(
        (decoded / 15 + 0.5) / (decoded / 30 + 0.5)
    )
    assert (halves.running, rows["sequential-half"].running) == (8, 4)
    assert rows["sequential-half"].speedup is None
    assert rows["none"].record()["k"] is None
    assert rows["auto"].used == {"halves": 1.0}


def test_streamed_rounds_add_latencies_and_change_nothing_else() -> None:
    without = Results(one_run("halves")).rows()
    (row,) = Results(together(one_run("halves"), streamed_run("halves"))).rows()
    assert row.streamed is not None
    assert replace(row, streamed=None) == without[0]
    assert row.record()["itl_mean"] == pytest.approx(0.02)


def test_outputs_are_compared_with_no_speculation_and_the_worst_round_counts() -> None:
    other = {cell_of("ahead", number=2): run_of(first_id=1, counters=counters_of())}
    same = [one_run(name, number=number) for name in ("none", "halves") for number in (1, 2)]
    results = Results(together(*same, one_run("ahead"), other))
    identical = {row.point.config: row.identical for row in results.rows()}
    assert identical == {"none": 1.0, "halves": 1.0, "ahead": 0.0}
