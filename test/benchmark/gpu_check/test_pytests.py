"""A pytest report becomes checks, with the smallest p-value."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmark.gpu_check.environment import ROOT
from benchmark.gpu_check.findings import Steps
from benchmark.gpu_check.pytests import DISTRIBUTION, KERNELS, MOCKED, read, run

REPORT = """\
<testsuites><testsuite>
<testcase name="test_a"><properties>
<property name="1 tokens" value="chi2=3.1 df=4 p=0.25 n=100"/>
<property name="2 tokens" value="chi2=9.0 df=9 p=0.003 n=100"/>
</properties></testcase>
<testcase name="test_b"><failure message="assert 1 == 2">long</failure></testcase>
<testcase name="test_c"><error message="no fixture">long</error></testcase>
<testcase name="test_d"><skipped message="not here"/></testcase>
</testsuite></testsuites>
"""


def test_a_report_names_failed_tests_and_counts_the_others() -> None:
    steps = Steps()
    read(steps, ElementTree.fromstring(REPORT))
    assert steps.found.passed == ["test_a"]
    assert steps.found.failed == {"test_b": "assert 1 == 2", "test_c": "no fixture"}
    assert steps.found.skipped == {"test_d": "not here"}
    assert steps.found.figures == {"passed": 1, "skipped": 1, "smallest_p": 0.003}


def test_a_run_without_a_passed_test_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="no test has passed"):
        read(Steps(), ElementTree.fromstring("<testsuites/>"))


def test_the_files_of_the_tests_exist() -> None:
    for name in (*KERNELS, *MOCKED, DISTRIBUTION):
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text()


def test_the_cause_of_a_failed_collection_is_named_and_the_output_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text("import no_such_module\n")
    with pytest.raises(RuntimeError, match="pytest ended with 2: .*no_such_module"):
        run(Steps(), [str(broken), "--rootdir", str(tmp_path), "-c", "/dev/null"])
    assert "ERROR collecting test_broken.py" in capfd.readouterr().out
