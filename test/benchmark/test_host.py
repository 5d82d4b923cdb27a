"""The counts of waits on the fake device of `bench_overhead --host`."""

import os

import pytest

from benchmark.overhead.host import KINDS, compare
from benchmark.overhead.stubbed import Device, answer_of, prompt_of


def test_a_wait_for_the_newest_pass_leaves_the_device_idle_but_at_the_end() -> None:
    device = Device()
    for early in (False, True):
        device.launch()
        if early:
            device.launch()
        device.wait(1 if not early else 2)
    device.wait(2)  # complete already
    device.wait(3)
    assert device.counts() == {"passes": 3, "waits": 3, "idle_waits": 1}


def test_an_event_waits_for_the_passes_before_it() -> None:
    device = Device()
    device.launch()
    event = device.event()
    event.record()
    device.launch()
    event.synchronize()
    assert device.events == [("launch", 1), ("launch", 2), ("wait", 1)]


def test_no_answer_repeats_a_token() -> None:
    assert len({*answer_of(prompt_of(3), 2000)}) == 2000


def test_both_servers_take_time_and_wait_once_for_each_pass() -> None:
    found = compare(2, dict(os.environ))
    for kind in KINDS:
        assert found[kind]["host_ms"] > 0.0
        assert found[kind]["waits_per_pass"] == pytest.approx(1.0, abs=0.05)
        assert found[kind]["idle_waits"] == 0
