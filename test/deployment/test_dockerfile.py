"""docs/deployment/Dockerfile passes hadolint, and agrees with the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_qspec import __version__
from sglang_qspec.engine.boundary.compat import SGLANG_VERSION
from test.deployment.manifests import FOLDER, compose, kustomization

ROOT = Path(__file__).parents[2]
FILE = FOLDER / "Dockerfile"
TEXT = FILE.read_text()


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).parent / "hadolint"
    return subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)


def test_hadolint_has_no_complaint() -> None:
    found = lint(FILE)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("right", "wrong"), [("USER 10001:10001", "USER root"), ("COPY python python", "COPI x y")]
)
def test_hadolint_finds_a_mistake(tmp_path: Path, right: str, wrong: str) -> None:
    (tmp_path / "Dockerfile").write_text(TEXT.replace(right, wrong))
    assert lint(tmp_path / "Dockerfile").returncode != 0


def test_every_copied_file_exists() -> None:
    copied = [line.split()[1:-1] for line in TEXT.splitlines() if line.startswith("COPY ")]
    names = [name for line in copied for name in line]
    assert len(names) >= 7
    assert not [name for name in names if not (ROOT / name).exists()]


def test_every_stage_ends_as_an_ordinary_user() -> None:
    for stage in re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]:
        assert re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1] == "10001:10001"


def test_the_image_has_bytecode_because_its_processes_cannot_write_it() -> None:
    assert "--compile-bytecode" in TEXT


def test_a_base_has_a_tag_and_a_digest() -> None:
    bases = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert len(bases) == 2
    for base in bases:
        assert re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", base)


def test_every_python_package_has_a_hash() -> None:
    installed = re.findall(r"pip install (.+?)(?: && |$)", TEXT.replace("\\\n", ""), re.MULTILINE)
    assert len(installed) == 5
    for arguments in installed:
        if "--no-deps" in arguments:  # the package itself, and what builds it
            assert "--build-constraint requirements/cuda.txt" in arguments
        else:
            assert "--require-hashes" in arguments
    for name in ("uv", "smg"):
        assert "--hash=sha256:" in (ROOT / "requirements" / f"{name}.txt").read_text()


def test_versions_agree() -> None:
    lock = (ROOT / "requirements" / "cuda.txt").read_text()
    cuda = re.search(r"^nvidia-cuda-nvcc==(\d+\.\d+)", lock, re.MULTILINE)
    assert cuda is not None
    assert f"FROM nvidia/cuda:{cuda[1]}." in TEXT
    assert f"\nsglang=={SGLANG_VERSION} " in lock
    router = re.search(r"ARG ROUTER=(\S+)", TEXT)
    assert router is not None
    assert f"\n{(ROOT / 'requirements' / f'{router[1]}.txt').read_text().strip()} " in lock
    version = __version__.removesuffix(".dev0")
    images = {service["image"].partition(":")[2] for service in compose()["services"].values()}
    images |= {image["newTag"] for image in kustomization()["images"]}
    assert images == {version}
