"""The `qspec` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_qspec import __version__
from sglang_qspec.__main__ import main
from sglang_qspec.tools.models import DemoModels


def test_models_demo_prints_the_two_folders(
    models: DemoModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "demo"]) == 0
    assert capsys.readouterr().out == f"target {models.target}\ndraft {models.draft}\n"


def test_a_qspec_error_is_one_line_with_exit_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "quantize", "--model", str(tmp_path), "--bits", "5"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "qspec: bits is 5, but must be 4 or 8\n"


@pytest.mark.parametrize(
    "wrong", [[], ["models"], ["modles"], ["models", "quantize"], ["doctor", "extra"]]
)
def test_a_wrong_usage_exits_with_two(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(wrong)
    assert stop.value.code == 2


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys; from sglang_qspec.__main__ import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'sglang', 'zmq', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"sglang-qspec {__version__}\n[]\n"


def test_the_sidecar_subcommand_runs_the_sidecar(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sidecar", "--help"])
    assert stop.value.code == 0
    assert "usage" in capsys.readouterr().out
