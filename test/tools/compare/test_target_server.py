"""The target's server, with a fake one in place of SGLang's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.compare import target_server as module
from sglang_qspec.tools.compare.target_server import target_server
from test.tools.batch.fakes import environment_with_fake_sglang

CPUS = frozenset(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fake SGLang, of which no process is left after the test."""
    fake = environment_with_fake_sglang(tmp_path)
    monkeypatch.setattr(module, "server_environment", lambda _device: fake)
    before = set(psutil.Process().children())  # of other tests
    yield
    assert not set(psutil.Process().children()) - before


@contextlib.contextmanager
def started(ticks: list[int], *flags: str) -> Iterator[list[str]]:
    """A running server, as its command line."""
    sizes = {"slots": 2, "widest": 4, "context": 100}
    before = set(psutil.Process().children())  # of other tests
    with target_server(
        "target", device="cpu", cpus=CPUS, tick=lambda: ticks.append(1), flags=flags, **sizes
    ):
        (process,) = set(psutil.Process().children()) - before
        yield process.cmdline()


def test_a_server_verifies_trees_of_the_widest_passes_and_ends_with_the_context() -> None:
    ticks: list[int] = []
    with started(ticks, "--dtype", "float32") as command:
        given = " ".join(command)
        assert "--model-path target" in given
        assert "--speculative-qspec-verify tree --speculative-num-draft-tokens 4" in given
        assert "--max-total-tokens 400 --dtype float32" in given
    assert ticks


def test_a_server_that_does_not_start_is_an_error_with_its_log() -> None:
    words = r"the start of the target's server ended with code 1:\n(.|\n)*the model is missing"
    with pytest.raises(QSpecError, match=words), started([], "fails"):
        pass
