"""The workers of pytest-xdist divide the suite by files, so that each server starts once."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from test.conftest import ROOT, SHARING, group

TESTS = """
class TestFirst:
    def test_one(self): ...
    def test_two(self): ...
    def test_three(self): ...

class TestSecond(TestFirst): ...
"""


def test_the_tests_of_a_file_run_in_one_worker(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    options = ["-n", "2", "--dist", "loadscope", "-v", "-p", "test.conftest", "--rootdir", "."]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    workers = defaultdict(set)
    for worker, file in re.findall(r"^\[(gw\d)\].* PASSED (\w+\.py)::", ended.stdout, re.MULTILINE):
        workers[file].add(worker)
    assert [len(found) for found in workers.values()] == [1] * 4
    assert len(set.union(*workers.values())) == 2


def test_the_tests_of_a_folder_with_a_server_are_one_group() -> None:
    assert all(any(folder.glob("conftest.py")) for folder in SHARING)
    assert group("test/engine/server/test_top.py::test_x[a::b]") == "test/engine/server"
    assert group("test/engine/test_lora.py::TestContract::test_x") == "test/engine/test_lora.py"
