"""An error in the plugin ends speculation once, but no interrupt. See also `test_faulty_hooks`."""

import logging
from collections.abc import Iterator

import pytest

from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.scheduler import lifecycle
from sglang_qspec.engine.speculator import Speculator


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A speculator without attributes, so that each of its methods fails."""
    broken = object.__new__(Speculator)
    speculation.activate(broken)
    yield
    speculation.deactivate()


@pytest.mark.usefixtures("active")
def test_a_hook_that_fails_repeatedly_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        lifecycle.polled(None, None)
    assert speculation.active() is None
    record, second = caplog.records
    assert "Speculation failed while receiving drafts;" in record.message
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert "sidecar could not be stopped" in second.message  # as the whole speculator is broken


def test_a_program_can_still_be_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt), guarded("testing"):
        raise KeyboardInterrupt
