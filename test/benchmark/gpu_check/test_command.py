"""`scripts/gpu-check` without a GPU: its last line, its files, and the failed checks it names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.gpu_check.__main__ import parse
from benchmark.gpu_check.parts import PARTS

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python" / "sglang_qspec"


def run(*arguments: str, package: Path = PACKAGE.parent) -> tuple[int, dict[str, Any]]:
    """The exit status and the last line of the command, with the package in a folder."""
    path = os.pathsep.join([str(package), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.gpu_check", "--emulate", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, record


@pytest.mark.thorough
def test_all_of_the_emulated_check_passes_and_says_what_it_left_out(tmp_path: Path) -> None:
    status, record = run("--output", str(tmp_path))
    assert record["failed"] == []
    assert status == 0
    assert record["emulated"] is True
    assert record["eager_passes"] == 0
    assert record["identical"] is True
    assert set(record["skipped"]) >= {part.name for part in PARTS if part.not_emulated}
    whole = json.loads((tmp_path / "results.json").read_text())
    assert list(whole["parts"]) == [part.name for part in PARTS]


def test_a_broken_kernel_is_named_and_the_other_tests_pass(tmp_path: Path) -> None:
    """The package with one wrong constant in the hash of the Triton kernel."""
    package = tmp_path / "python"
    (package / "sglang_qspec" / "verify").mkdir(parents=True)
    for folder, copy in (
        (PACKAGE, package / "sglang_qspec"),
        (PACKAGE / "verify", package / "sglang_qspec" / "verify"),
    ):
        for path in folder.iterdir():
            if not (copy / path.name).exists():
                (copy / path.name).symlink_to(path)
    kernel = package / "sglang_qspec" / "verify" / "gumbel_triton.py"
    source = kernel.read_text()
    assert "0xE6546B64" in source
    kernel.unlink()
    kernel.write_text(source.replace("0xE6546B64", "0xE6546B65"))
    output = tmp_path / "out"
    status, record = run("environment", "kernels", "--output", str(output), package=package)
    assert record["failed"] == [
        f"kernels.test_the_kernels_draw_what_the_cpu_draws[{kernel}]"
        for kernel in ("all", "filtered")
    ]
    assert status == 1
    assert (record["eager_passes"], record["identical"]) == (None, None)
    kernels = json.loads((output / "results.json").read_text())["parts"]["kernels"]
    assert "test_the_stand_ins_agree_with_sgl_kernel" in kernels["skipped"]
    assert kernels["figures"]["passed"] > 20
    page = (output / "table.md").read_text()
    assert "no figure here is of a GPU" in page
    assert "- failed: kernels.test_the_kernels" in page


def test_without_a_failed_check_the_exit_status_is_0(tmp_path: Path) -> None:
    status, record = run("environment", "--output", str(tmp_path))
    assert (status, record["failed"]) == (0, [])
    assert set(record["skipped"]) == {f"environment.{n}" for n in ("gpu", "toolkit", "sgl_kernel")}


@pytest.mark.parametrize("arguments", [["karnels", "--emulate"], ["--minutes", "0"], []])
def test_a_bad_option_or_a_machine_without_a_gpu_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    named = arguments[0] if arguments else "--emulate runs what needs none"
    assert named in capsys.readouterr().err
