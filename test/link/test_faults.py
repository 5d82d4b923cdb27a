"""Counting and logging of faults, measuring of silence, and the send window."""

from __future__ import annotations

import logging

import pytest

from sglang_qspec.link.faults import LOG_INTERVAL_S, Faults, quote
from sglang_qspec.link.listening import Listening
from sglang_qspec.link.window import Window


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_kind_is_logged_at_most_once_a_minute_and_always_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = HandClock()
    faults = Faults(logging.getLogger("test"), clock)
    for _ in range(50):
        faults.note("drop", "x")
        faults.note("garbage", "y")
    assert (faults["drop"], faults["garbage"], faults["other"]) == (50, 50, 0)
    assert len(caplog.records) == 2
    clock.now += LOG_INTERVAL_S
    faults.note("drop", "x")
    assert len(caplog.records) == 3
    assert "51 so far" in caplog.text


def test_text_from_a_peer_is_cut_and_escaped_in_the_log() -> None:
    assert quote("plain text, ok") == "plain text, ok"
    assert quote("a\nb\x1b[0m\u202e") == "a\\nb\\x1b[0m\\u202e"
    assert len(quote("x" * 10_000)) < 400


def test_listened_time_counts_gaps_up_to_a_cap_and_waiting_in_full() -> None:
    clock = HandClock()
    listening = Listening(longest_gap_s=1.0, clock=clock)
    clock.now += 0.25
    assert listening.look() == 0.25
    clock.now += 60.0
    assert listening.look() == 1.25
    clock.now += 60.0
    assert listening.look(waited_s=10.0) == 12.25


def test_an_answer_opens_the_window_only_for_bytes_sent_before_its_ping() -> None:
    window = Window(100)
    window.sent(60)
    window.asked(1)
    assert window.fits(40)
    assert not window.fits(41)
    window.sent(40)
    window.asked(2)
    window.sent(0)
    window.answered(1)
    assert window.unread == 40
    window.sent(20)
    window.answered(2)
    assert window.unread == 20
    window.answered(1)
    assert window.unread == 20
    window.reset()
    assert window.unread == 0
