"""Rates and ratios of two recorded snapshots of a server."""

import copy

import pytest

from sglang_qspec.errors import ClientError
from sglang_qspec.tools.top.interval import Interval, Snapshot
from test.tools.top.recorded import IDLE, LOADED, later


def test_the_accept_length_adds_up_the_tokens_of_all_sources_and_the_target() -> None:
    before, now = (snapshot.state for snapshot in LOADED)
    requests = now["pipelines"]["ahead"]["requests"] - before["pipelines"]["ahead"]["requests"]
    accepted = sum(now["accepted_tokens"].values()) - sum(before["accepted_tokens"].values())
    interval = Interval(*LOADED)
    assert accepted > 100
    assert interval.accept_length == pytest.approx(1 + accepted / requests)
    seconds = LOADED[1].time - LOADED[0].time
    assert interval.token_rate == pytest.approx((requests + accepted) / seconds)
    drafted = now["drafted_tokens"] - before["drafted_tokens"]
    assert interval.rate("drafted_tokens") == pytest.approx(drafted / seconds)


def test_only_pipelines_with_passes_in_the_interval_are_named() -> None:
    assert Interval(*LOADED).pipelines == ("ahead",)
    assert Interval(LOADED[1], later(LOADED[1])).pipelines == ()


def test_an_idle_server_has_rates_of_zero_and_no_accept_length() -> None:
    interval = Interval(IDLE, later(IDLE))
    assert interval.token_rate == interval.rate("drafted_tokens") == 0
    assert interval.accept_length is None


def test_counts_of_a_restarted_server_do_not_fall() -> None:
    interval = Interval(LOADED[1], later(IDLE, LOADED[1].time))
    assert interval.of_sources("accepted_tokens") == interval.rate("drafted_tokens") == 0


def test_a_field_that_the_server_lacks_is_named() -> None:
    state = copy.deepcopy(dict(IDLE.state))
    del state["pipelines"]["ahead"]["passes"]
    with pytest.raises(ClientError, match=r"no field pipelines\.ahead\.passes"):
        Snapshot(0.0, state).value("pipelines", "ahead", "passes")
