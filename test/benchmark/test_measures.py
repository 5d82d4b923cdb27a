"""The figures of a configuration, from answers whose figures are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmark.queueing.journal import Entry
from benchmark.queueing.measures import (
    match_rates,
    measure,
    medians,
    percentile,
    request_speedups,
)
from benchmark.queueing.serving import read_answer
from benchmark.queueing.summary import summarize
from test.benchmark.runs import answer, entries, run


def test_without_speculation_every_token_takes_a_pass() -> None:
    plain = run(answer(10), answer(4), seconds=2.0)
    measures = measure(plain, plain)
    assert measures.tokens_per_s == 7.0
    assert measures.accept_len == 1.0
    assert measures.passes_per_token == 1.0
    assert measures.match_rate is None
    assert measures.wasted is None
    assert (measures.speedup, measures.identical) == (1.0, 1.0)


def test_acceptance_is_counted_over_all_requests() -> None:
    runs = run(
        answer(10, passes=4, proposed=20, accepted={"queue": 4, "prompt": 1}),
        answer(10, passes=6, proposed=5, accepted={"queue": 3, "prompt": 0}),
        seconds=1.0,
        drafted=30,
    )
    measures = measure(runs, run(answer(10), answer(10), seconds=4.0))
    assert measures.accept_len == pytest.approx(1 + 8 / 10)
    assert measures.match_rate == pytest.approx(8 / 25)
    assert measures.passes_per_token == pytest.approx(12 / 20)
    assert measures.accepted == {"queue": 7, "prompt": 1}
    assert (measures.drafted, measures.wasted) == (30, 23)
    assert measures.speedup == pytest.approx(4.0)
    assert match_rates(runs) == [5 / 20, 3 / 5]


def test_what_was_accepted_beyond_the_end_of_an_output_is_not_in_the_accept_length() -> None:
    runs = run(answer(9, passes=2, proposed=30, accepted={"queue": 14}))
    assert measure(runs, None).accept_len == pytest.approx(8 / 2)


def test_a_request_with_other_output_is_counted() -> None:
    plain = run(answer(5), answer(5))
    other = run(answer(5), answer(5, first_id=1))
    assert measure(other, plain).identical == 0.5


def test_the_speedup_of_a_request_is_by_token_and_leaves_the_queue_out() -> None:
    plain = run(answer(10, service=2.0, latency=100.0))
    faster = run(answer(20, service=1.0, latency=50.0))
    assert request_speedups(faster, plain) == [pytest.approx(4.0)]


def test_figures_of_several_rounds_are_medians_and_the_least_identical_share() -> None:
    plain = run(answer(6), seconds=6.0)
    rounds = [
        measure(run(answer(6, first_id=first), seconds=seconds), plain)
        for first, seconds in ((0, 1.0), (1, 2.0), (0, 3.0))
    ]
    middle = medians(rounds)
    assert (middle.speedup, middle.tokens_per_s, middle.identical) == (3.0, 3.0, 0.0)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert percentile(values, 0.99) == 198.0
    assert percentile([3.0], 0.99) == 3.0


def test_an_answer_is_read_by_what_served_it() -> None:
    meta: dict[str, Any] = {"e2e_latency": 5.0, "queue_time": 3.5}
    body = {"output_ids": [1, 2, 3, 4, 5], "meta_info": meta}
    plain = read_answer(body, 6.0)
    assert (plain.passes, plain.proposed, plain.service, plain.latency) == (4, 0, 1.5, 6.0)
    # SGLang fills these in for QSPEC as well, where its own record counts.
    meta |= {"spec_verify_ct": 2, "spec_num_proposed_drafts": 22, "spec_num_correct_drafts": 2}
    ngram = read_answer(body, 6.0)
    assert (ngram.passes, ngram.proposed, ngram.accepted) == (2, 22, {"ngram": 2})
    sources = {"queue": 1, "output": 0}
    meta["qspec"] = {"passes": 3, "proposed_tokens": 7, "accepted_by_source": sources}
    qspec = read_answer(body, 6.0)
    assert (qspec.passes, qspec.proposed, qspec.accepted) == (3, 7, sources)


def test_a_summary_compares_within_a_round_and_keeps_what_failed() -> None:
    names = ("none", "none-equal", "ngram", "qspec-8")
    served = ("none", "none-equal", "qspec-8")
    summary = summarize([*entries(1, served), *entries(2, served)], names, {"ngram": "no kernel"})
    assert [row.config for row in summary.rows] == ["none", "none-equal", "qspec-8"]
    assert summary.blocks == 4
    record, failure = summary.records()[2:]
    assert record["speedup"] == record["by_group"]["rag"]["speedup"] == 2.0
    assert record["identical_share"] == 1.0
    assert (record["drafted"], record["wasted"]) == (80, 71)
    assert record["accepted_share_by_source"] == {"queue": 0.6, "output": 0.4}
    assert failure == {"config": "ngram", "speedup": None, "error": "no kernel"}


def test_equal_hardware_gives_both_sides_all_cores() -> None:
    names = ("none", "none-equal", "lookup", "lookup-equal", "ngram", "qspec-8")
    written = [
        *entries(1, ("none", "none-equal", "lookup", "ngram", "qspec-8")),
        *(Entry(1, "lookup-equal", replace(e.run, seconds=1.0)) for e in entries(1, ("none",))),
    ]
    summary = summarize(written, names, {})
    equal = {row.config: row.equal_hardware_speedup for row in summary.rows}
    # 8 s of no speculation against 4 s, and 2 s of lookup where it has all cores.
    assert equal == {
        "none": 1.0,
        "none-equal": 1.0,
        "lookup": 4.0,
        "lookup-equal": 4.0,
        "ngram": None,
        "qspec-8": 2.0,
    }
    assert summary.equal_hardware_speedup == 2.0


def test_a_block_counts_once_all_configurations_have_served_it() -> None:
    written = [*entries(1, ("none", "lookup")), *entries(2, ("none",))]
    cut = [entry for entry in written if (entry.config, entry.run.group) != ("lookup", "rag")]
    summary = summarize(cut, ("none", "lookup"), {})
    assert summary.blocks == 1
    assert [list(row.by_group) for row in summary.rows] == [["qa"], ["qa"]]
    assert [row.overall.tokens for row in summary.rows] == [20, 20]
    assert summarize(entries(1, ("none",)), ("none", "lookup"), {}).rows == []


def test_without_a_baseline_there_are_figures_but_no_speedup() -> None:
    summary = summarize(entries(1, ("qspec-8",)), ("qspec-8",), {})
    record = summary.records()[0]
    assert record["speedup"] is None
    assert record["identical_share"] is None
    assert summary.equal_hardware_speedup is None
    assert record["accept_len"] == 2.25
