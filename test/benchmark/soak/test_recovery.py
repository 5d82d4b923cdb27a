"""The time until throughput recovers, computed from the arrival times of tokens."""

import pytest

from benchmark.bench_soak import parse
from benchmark.soak.faults import FAULTS, figures
from benchmark.soak.recovery import bins, rate, seconds_until

# 10 tokens/s until 5, nothing until 6.5, then 20 tokens/s.
EVENTS = [(0.1 * n + 0.05, 1) for n in range(50)] + [(6.5 + 0.1 * n + 0.05, 2) for n in range(50)]


def test_a_rate_is_tokens_over_time() -> None:
    assert round(rate(EVENTS, 1.0, 3.0), 6) == 10.0
    assert rate(EVENTS, 5.0, 6.5) == 0.0
    assert rate([(1.0, 3), (2.0, 5)], 1.0, 2.0) == 3.0


def test_throughput_has_recovered_at_the_first_window_above_the_threshold() -> None:
    assert seconds_until(EVENTS, 1.0, wanted=9.9, window=1.0, limit=5.0) == 0.0
    assert seconds_until(EVENTS, 5.0, wanted=9.9, window=1.0, limit=5.0) == 1.0
    assert seconds_until(EVENTS, 5.0, wanted=19.9, window=1.0, limit=5.0) == 1.5


def test_throughput_that_does_not_recover_in_time_has_no_recovery_time() -> None:
    assert seconds_until(EVENTS, 5.0, wanted=25.0, window=1.0, limit=4.0) is None


def test_bins_are_relative_to_a_moment() -> None:
    assert [round(x) for x in bins(EVENTS, 5.0, -1.0, 2.0, 0.5)] == [10, 10, 0, 0, 0, 20]


def test_the_chart_has_a_line_for_each_fault_and_is_drawn_from_the_record() -> None:
    pytest.importorskip("matplotlib")
    record = {"plain_tokens_per_s": 30.0, "bins": {fault: [60.0, 20.0, 61.0] for fault in FAULTS}}
    (figure,) = figures(record)
    assert all(text in (figure.svg or "") for text in FAULTS.values())
    assert figures(record) == [figure]


def test_faults_are_all_unless_some_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([]).faults is None
    assert parse(["--faults"]).faults == list(FAULTS)
    chosen = parse(["--faults", "kill", "--output", "o", "--", "--a", "b"])
    assert (chosen.faults, chosen.arguments, chosen.cpu) == (["kill"], ["--a", "b"], False)
    with pytest.raises(SystemExit):
        parse(["--report-only", "--output", "o"])
    assert "need --faults" in capsys.readouterr().err
