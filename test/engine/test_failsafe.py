"""An error in the plugin ends speculation, not the server.

A second SGLang plugin raises the errors in a running server, which passes as a GPU server does.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.engine import speculation
from sglang_qspec.engine.boundary.failsafe import guarded
from sglang_qspec.engine.scheduler import lifecycle
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.tools.models import DemoModels
from test.engine.faulty import plugin
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import (
    COMMON,
    QSPEC,
    cores,
    generate,
    sidecar_processes,
    state,
    until,
)
from test.preloaded.server import Server

FAULTY = """
from itertools import count

def load():
    from sglang_qspec.engine.speculator import Speculator

    calls, sound = count(), Speculator.commit

    def commit(*arguments):
        if next(calls) == 4:
            raise KeyError("a fault")
        return sound(*arguments)

    Speculator.commit = commit
"""


@pytest.fixture(
    params=[GPU_SHAPE, pytest.param("", marks=pytest.mark.thorough)], ids=["gpu", "normal"]
)
def faulty(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a server with a plugin that makes a pass fail."""
    return plugin(tmp_path, FAULTY + request.param)


@pytest.mark.server
def test_an_error_between_two_passes_costs_the_drafts_and_nothing_else(
    models: DemoModels, faulty: dict[str, str]
) -> None:
    prompts = render(models.target, PROMPTS)[:4]
    arguments = [
        *COMMON,
        *(*QSPEC, "--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
    ]
    with Server(models.target, arguments, cores=cores(0), environment=faulty) as server:
        with ThreadPoolExecutor(len(prompts)) as pool:
            during = list(pool.map(lambda text: generate(server, text), prompts))
        assert state(server)["failed"]
        assert server.log.count("Speculation failed while committing the tokens of a pass;") == 1
        until(lambda: not sidecar_processes(server))
        for prompt, answer in zip(prompts, during, strict=True):
            after = generate(server, prompt)
            assert "qspec" not in after["meta_info"]
            assert after["output_ids"] == answer["output_ids"]
        chosen = generate(server, prompts[0], temperature=0.8, max_new_tokens=8)
        assert chosen["meta_info"]["completion_tokens"] == 8


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
