"""The doctor finds a Python, a package, settings and an SGLang that cannot serve."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.tools.doctor import software
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Status

PACKAGE = Path(__file__).parents[3] / "python" / "sglang_qspec"

ONE_CHECK = """
import dataclasses, json, sys
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.checks import CHECKS
from sglang_qspec.tools.doctor.finding import examine
(check,) = (each for each in CHECKS if each.name == sys.argv[1])
found = examine(check.name, lambda: check.run(Case(kind="cpu")))
print(json.dumps(dataclasses.asdict(found)))
"""


def in_new_process(check: str, before: str = "", **environment: str) -> dict[str, Any]:
    """The finding of one check in a new process, which first runs the script `before`."""
    done = subprocess.run(
        [sys.executable, "-c", before + ONE_CHECK, check],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    finding: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return finding


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), Status.FAILURE), ((3, 11), Status.OK), ((3, 12), Status.OK), ((3, 13), "warning")],
)
def test_an_old_python_is_a_failure_and_an_untested_one_a_warning(
    version: tuple[int, int], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert software.python(Case()).status == status


def test_a_package_without_its_compiled_tries_is_a_failure_that_says_how_to_build_them(
    tmp_path: Path,
) -> None:
    without = shutil.ignore_patterns("__pycache__", "_native*.so")
    shutil.copytree(PACKAGE, tmp_path / "sglang_qspec", ignore=without)
    finding = in_new_process("package", PYTHONPATH=str(tmp_path))
    assert finding["status"] == "failure"
    assert "_native" in finding["found"]
    assert "pip install ." in finding["advice"]


def test_all_wrong_variables_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_QSPEC_COMPLETIONS", "0")
    monkeypatch.setenv("SGLANG_QSPEC_TEMPERATURE", "hot")
    monkeypatch.setenv("SGLANG_QSPEC_CORE", "1")
    monkeypatch.setenv("SGLANG_QSPEC_MODE", "auto")
    case = Case()
    finding = software.settings(case)
    assert finding.status is Status.FAILURE
    assert "SGLANG_QSPEC_COMPLETIONS is '0'" in finding.found
    assert "SGLANG_QSPEC_TEMPERATURE is 'hot'" in finding.found
    assert "SGLANG_QSPEC_CORE is not a setting" in finding.found
    assert "SGLANG_QSPEC_MODE is" not in finding.found
    assert case.settings is None


def test_changed_settings_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.settings(Case()).found == "all settings have their defaults"
    monkeypatch.setenv("SGLANG_QSPEC_CORES", "shared")
    case = Case()
    assert software.settings(case).found == "set: SGLANG_QSPEC_CORES"
    assert case.settings is not None
    assert case.settings.cores == "shared"


def test_a_python_without_sglang_is_a_failure_that_says_how_to_install_it() -> None:
    hidden = "import sys\nsys.modules['sglang'] = None\n"
    finding = in_new_process("sglang", hidden)
    assert finding["status"] == "failure"
    assert finding["found"].startswith("sglang 0.5.23 does not fit: ")
    assert "pip install ." in finding["advice"]


def test_another_release_of_sglang_is_a_failure_that_names_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_qspec.tools.doctor.finding import examine

    monkeypatch.setattr("sglang.__version__", "0.6.0")
    case = Case(kind="cpu")
    finding = examine("sglang", lambda: software.sglang(case))
    assert finding.status is Status.FAILURE
    assert "sglang is 0.6.0" in finding.found
    assert "only 0.5.23" in finding.found
    assert not case.sglang


def test_a_name_that_sglang_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_qspec.engine.boundary import compat

    names = compat.used_names(())
    assert compat.missing_names(names) == []
    monkeypatch.delattr("sglang.srt.utils.hf_transformers_utils.get_config")
    missing = ["sglang.srt.utils.hf_transformers_utils.get_config"]
    assert compat.missing_names(names) == missing
