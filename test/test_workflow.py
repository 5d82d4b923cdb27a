"""The workflow for clones on GitHub is valid, has few rights, and runs the commands of the docs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".github" / "workflows" / "ci.yml"


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return found


def check(path: Path) -> int:
    """The exit status of check-jsonschema with the schemas of workflows that it ships."""
    program = Path(sys.executable).parent / "check-jsonschema"
    schemas = ("vendor.github-workflows", "custom.github-workflows-require-timeout")
    commands = [[str(program), "--builtin-schema", schema, str(path)] for schema in schemas]
    return max(subprocess.run(command, capture_output=True).returncode for command in commands)


def test_the_workflow_fits_the_schema() -> None:
    assert check(FILE) == 0


@pytest.mark.parametrize(("right", "wrong"), [("runs-on", "runs"), ("timeout-minutes: 60", "")])
def test_the_schema_refuses_a_mistake(tmp_path: Path, right: str, wrong: str) -> None:
    (tmp_path / "ci.yml").write_text(FILE.read_text().replace(right, wrong))
    assert check(tmp_path / "ci.yml") != 0


def test_the_workflow_runs_the_documented_commands_on_all_supported_pythons() -> None:
    (job,) = workflow()["jobs"].values()
    commands = [step["run"] for step in job["steps"]]
    assert commands[-2:] == ["scripts/check", "scripts/test --fast"]
    supported = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert job["strategy"]["matrix"]["python"] == supported


def test_the_workflow_may_only_read_and_uses_no_foreign_action() -> None:
    assert workflow()["permissions"] == {"contents": "read"}
    assert "uses:" not in FILE.read_text()
