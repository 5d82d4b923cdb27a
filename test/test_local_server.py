"""A server as a child process, with a fake one in place of SGLang's."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from sglang_qspec.tools.local_server import LocalServer
from test.tools.batch.fakes import environment_with_fake_sglang, wait_for


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return environment_with_fake_sglang(tmp_path)


def test_a_server_runs_on_its_cpus_until_it_is_stopped(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    own = os.sched_getaffinity(0)
    cpus = frozenset({min(own)})
    server = LocalServer(["--model-path", "m"], environment, tmp_path / "log", cpus=cpus)
    server.launch()
    try:
        wait_for(server.url)
        port = server.url.rpartition(":")[2]
        (process,) = (each for each in psutil.Process().children() if port in each.cmdline())
        assert server.exit_code() is None
        assert set(process.cpu_affinity()) == cpus
        assert os.sched_getaffinity(0) == own
        assert os.getpgid(process.pid) != os.getpgid(0)
    finally:
        server.stop()
    assert not process.is_running()
    server.stop()  # a second time does nothing


def test_the_reason_of_a_failed_start_is_in_the_message(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    server = LocalServer(["fails"], environment, tmp_path / "log")
    server.launch()
    assert server.exit_code(60) is not None
    heading, *lines = server.obituary().splitlines()
    assert heading == "ended with code 1:"
    assert lines[-1] == "the model is missing"
    server.stop()


def test_a_server_that_has_ended_is_not_looked_up_by_its_id(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have given the id to a process of somebody else."""
    server = LocalServer(["fails"], environment, tmp_path / "log")
    server.launch()
    assert server.exit_code(60) is not None
    asked: list[int] = []
    monkeypatch.setattr(psutil, "Process", asked.append)
    server.stop()
    assert not asked
