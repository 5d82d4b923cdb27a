"""Arrivals of a deployment and of its groups."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.plan.trace import parse


def test_a_group_gets_its_share_of_the_rate() -> None:
    trace = parse("poisson:100:1000000", 50, 20)
    found = trace.part(0.01, 4000, 1)
    assert len(found) == 4000
    assert found[-1].seconds == pytest.approx(4000, rel=0.1)
    assert sum(arrival.output for arrival in found) / 4000 == pytest.approx(20, rel=0.05)
    assert {arrival.prompt for arrival in found} == {50}


def test_a_group_of_a_router_that_takes_turns_gets_every_nth_arrival() -> None:
    trace = parse("poisson:100:1000000", 50, 20)
    gaps = np.diff([each.seconds for each in trace.part(0.04, 4000, 1)])
    # The sum of n gaps of a Poisson process varies less than one gap by the root of n.
    assert gaps.std() / gaps.mean() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("output", [1, 3, 256])
def test_outputs_have_the_mean_that_was_asked_for(output: int) -> None:
    trace = parse("batch:4000", 50, output)
    assert fmean(each.output for each in trace.part(1.0, 4000, 1)) == pytest.approx(
        output, rel=0.03
    )
    assert (trace.mean_prompt, trace.context) == (50, 50 + round(output / 2))


def test_a_small_batch_has_the_requests_of_its_fullest_group() -> None:
    trace = parse("batch:10", 50, 20)
    assert [len(trace.part(share, 100, 1)) for share in (1 / 3, 0.07, 0.01)] == [4, 1, 1]


def test_a_batch_arrives_at_once_and_a_group_gets_its_share() -> None:
    found = parse("batch:100", 50, 20).part(0.25, 1000, 1)
    assert len(found) == 25
    assert {arrival.seconds for arrival in found} == {0.0}


def test_a_log_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [f'{{"seconds": {s}, "prompt_tokens": 5, "output_tokens": {n}}}' for s, n in
             ((2, 30), (0, 10), (1, 20), (3, 40))]  # fmt: skip
    path.write_text("\n\n".join(lines))
    trace = parse(str(path), 0, 0)
    assert [arrival.output for arrival in trace.part(1.0, 10, 1)] == [10, 20, 30, 40]
    assert [arrival.output for arrival in trace.part(0.5, 10, 1)] == [10, 30]
    assert (trace.requests, trace.mean_output, trace.mean_prompt) == (4, 25, 5)
    assert trace.rate == pytest.approx(4 / 3)
    assert [arrival.seconds for arrival in trace.at_once().part(1.0, 5, 1)] == [0.0] * 5


def test_the_time_of_a_log_begins_with_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = (f'{{"seconds": {1.7e9 + s}, "prompt_tokens": 5, "output_tokens": 9}}' for s in (0, 2))
    path.write_text("\n".join(lines))
    trace = parse(str(path), 0, 0)
    assert [arrival.seconds for arrival in trace.part(1.0, 2, 1)] == [0.0, 2.0]
    assert trace.rate == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text", ["batch", "batch:0", "batch:x", "batch:1:2", "poisson:5", "poisson:0:5",
             "poisson:inf:5", "poisson:nan:5", "poisson:1e-320:5", "poisson:1e308:5",
             "poisson:1:0"]
)  # fmt: skip
def test_a_wrong_trace_is_named_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--trace is '{text}', but must be batch:REQUESTS"):
        parse(text, 1, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "missing required field `seconds`"),
        ('{"seconds": -1, "prompt_tokens": 1, "output_tokens": 1}', r"\$.seconds"),
        ('{"seconds": 0, "prompt_tokens": 1, "output_tokens": 0}', r"\$.output_tokens"),
        ('{"seconds": 0, "prompt_tokens": 1, "output_tokens": 1000000}', r"\$.output_tokens"),
        ("", "the log has no request"),
    ],
)
def test_a_wrong_line_of_a_log_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        parse(str(path), 1, 1)


def test_a_log_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="--trace is 'none.jsonl'"):
        parse("none.jsonl", 1, 1)
