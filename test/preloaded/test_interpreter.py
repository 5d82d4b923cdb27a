"""A preloaded process runs a command like a new Python process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from test.engine.server.running import until
from test.preloaded.interpreter import preloaded, suits

pytestmark = pytest.mark.server  # so that it shares the imports with the tests of servers

SHOW = """
import json, multiprocessing, os, sys, torch
print(json.dumps({
    "parent": os.getppid(),
    "group": os.getpgid(0) == os.getpid(),
    "argv": sys.argv,
    "variable": os.environ.get("SOME_VARIABLE"),
    "folder": os.getcwd(),
    "path": sys.path,
    "first": multiprocessing.parent_process() is None,
    "threads": torch.get_num_threads(),
    "roles": [name for name in sys.modules if name == "sglang.srt.managers.scheduler"],
}))
import sglang.srt.managers.scheduler
assert "sglang.srt.managers.scheduler" in sys.modules
assert "sglang.srt.managers.detokenizer_manager" not in sys.modules
sys.exit(7)
"""
FAMILY = """
import multiprocessing, time
multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
time.sleep(600)
"""


def titles(pid: int) -> dict[psutil.Process, str]:
    """The children of a process, each with its command line."""
    return {one: " ".join(one.cmdline()).strip() for one in psutil.Process(pid).children()}


def started(code: str, output: Path, *, folder: Path, environment: dict[str, str]) -> int:
    with output.open("w") as written:
        return preloaded().start(
            ["-c", code, "an argument"],
            {0: 0, 1: written.fileno(), 2: written.fileno()},
            environment=os.environ | environment,
            folder=str(folder),
            own_group=True,
        )


def test_a_command_finds_what_a_new_process_would_find(tmp_path: Path) -> None:
    output = tmp_path / "output"
    environment = {"SOME_VARIABLE": "x", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    pid = started(SHOW, output, folder=tmp_path, environment=environment)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7, output.read_text()
    found = json.loads(output.read_text())
    assert str(tmp_path) in found.pop("path")
    assert found == {
        "parent": os.getpid(),
        "group": True,
        "argv": ["-c", "an argument"],
        "variable": "x",
        "folder": str(tmp_path),
        "first": True,
        "threads": 1,
        "roles": [],
    }


def test_the_processes_of_a_command_are_its_children_as_if_python_had_spawned_them(
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    pid = started(FAMILY, output, folder=tmp_path, environment={})
    try:
        until(lambda: any("--multiprocessing-fork" in title for title in titles(pid).values()))
        found = titles(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (waiting,) = (one for one, title in found.items() if title == "preloaded")
    waiting.wait(60)  # it ends with the process that it belongs to
    # `multiprocessing` ends no child of a killed process; SGLang's processes end by themselves.
    (spawned,) = (one for one, title in found.items() if "--multiprocessing-fork" in title)
    own = spawned.children()
    spawned.kill()
    _, alive = psutil.wait_procs([spawned, *own], 60)
    assert not alive


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"SGLANG_QSPEC_MODE": "queue", "OMP_NUM_THREADS": "1", "PYTHONPATH": "x"}, True),
        ({"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}, True),
        ({"SGLANG_CACHE_DIR": "x"}, False),
        ({"SGLANG_USE_CPU_ENGINE": "0"}, False),
        ({"QSPEC_TEST_SLOW": "target=5"}, False),
        ({"HF_HUB_CACHE": "x"}, False),
    ],
)
def test_a_setting_that_is_read_at_import_needs_a_new_process(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], fits: bool
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    environment = os.environ | changes
    program = ["-m", "sglang.launch_server"]
    for options in (program, ["-W", "ignore", *program]):
        assert suits([sys.executable, *options], environment) is fits
    for options in (["-m", "json.tool"], ["-c", "import sglang.launch_server"], ["-m"], []):
        assert not suits([sys.executable, *options], environment)
    assert not suits(["python3", *program], environment)
