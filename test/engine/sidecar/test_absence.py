"""The server warns of a sidecar that does not connect."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from sglang_qspec.engine.sidecar.absence import WARN_AFTER_S, Absence
from sglang_qspec.link import FakeSidecarLink, LinkState
from test.engine.speculating import make, poll


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Process:
    """Stands for the server's own sidecar."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid


def test_a_sidecar_that_does_not_connect_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, link = Clock(), FakeSidecarLink()
    active = make(link, clock)
    link.die()
    poll(active)
    assert active.describe()["sidecar_warning"] is None
    clock.now = WARN_AFTER_S + 13
    with caplog.at_level(logging.WARNING):
        poll(active)
        clock.now += 1
        poll(active)
    (found,) = [each.message for each in caplog.records if "connected for" in each.message]
    assert found.startswith("no sidecar has been connected for 43 s (connecting). Requests are")
    assert str(active.describe()["sidecar_warning"]).startswith("no sidecar has been connected")


def test_a_connected_sidecar_ends_the_warning() -> None:
    clock = Clock()
    absence = Absence(None, clock)
    absence.look(LinkState.CONNECTING)
    clock.now = WARN_AFTER_S
    absence.look(LinkState.CONNECTING)
    assert absence.warning is not None
    absence.look(LinkState.READY)
    assert absence.warning is None
    absence.look(LinkState.LOST)
    assert absence.warning is None
    clock.now = 2 * WARN_AFTER_S
    assert absence.warning is not None


def test_a_server_without_a_sidecar_has_no_warning() -> None:
    clock = Clock()
    active = make(None, clock)
    clock.now = 10 * WARN_AFTER_S
    poll(active)
    assert active.describe()["sidecar_warning"] is None


@pytest.mark.parametrize(("cpu_s", "is_starved"), [(3.5, True), (29.0, False)])
def test_the_warning_says_how_much_cpu_time_the_sidecar_has_had(
    cpu_s: float, is_starved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    process: Any = Process(os.getpid())
    absence = Absence(process, clock)
    absence.look(LinkState.CONNECTING)
    clock.now = WARN_AFTER_S
    assert "s of CPU time" in str(absence.warning)
    monkeypatch.setattr(absence, "_cpu_seconds", lambda: cpu_s)
    assert f"it has had {cpu_s} s of CPU time" in str(absence.warning)
    assert ("other work has its CPUs" in str(absence.warning)) is is_starved


def test_a_sidecar_that_has_ended_has_no_cpu_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    clock = Clock()
    process: Any = Process(child.pid)
    absence = Absence(process, clock)
    absence.look(LinkState.CONNECTING)
    clock.now = WARN_AFTER_S
    assert "CPU time" not in str(absence.warning)
