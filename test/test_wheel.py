"""The sdist and the wheel: a server runs from the installed wheel, outside the checkout."""

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import sglang_qspec
from benchmark.harness.server import Server
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.server.running import COMMON, cores, generate, of_sidecar, state, tagged, until
from test.repository import ROOT, copy_tracked, run

LOCK = ROOT / "requirements" / ("cuda.txt" if shutil.which("nvidia-smi") else "cpu.txt")

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(1800)]


def test_a_server_runs_from_the_wheel_that_the_sdist_gives(
    models: DemoModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = shutil.which("uv") or ROOT / ".venv-uv" / "bin" / "uv"
    source = tmp_path / "source"
    copy_tracked(source)
    dist, environment = tmp_path / "dist", tmp_path / "environment"
    build = ["--no-build-isolation", "--python", sys.executable]
    run(uv, "build", *build, "--out-dir", dist, cwd=source)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        packed = archive.getnames()
    for part in (
        "LICENSE",
        "trie/native/module.cpp",
        "cpu/native/decoder.h",
        "py.typed",
        "page.js",
    ):
        assert any(name.endswith(part) for name in packed), part
    names = zipfile.ZipFile(wheel).namelist()
    for part in (
        "LICENSE",
        "py.typed",
        "_native.pyi",
        ".so",
        "entry_points.txt",
        "standin",
        "index.html",
    ):
        assert any(part in name for name in names), part
    assert not any(name.startswith(("test", "benchmark")) for name in names)

    run(uv, "venv", "--python", sys.executable, environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    run(uv, "pip", "sync", "--python", python, "--require-hashes", LOCK, cwd=tmp_path)
    run(uv, "pip", "install", "--python", python, "--no-deps", wheel, cwd=tmp_path)
    version = run(environment / "bin" / "qspec", "--version", cwd=tmp_path)
    assert sglang_qspec.__version__ in version

    monkeypatch.chdir(tmp_path)
    arguments = [
        *COMMON,
        *("--speculative-algorithm", "QSPEC"),
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
    ]
    (tmp_path / "plugin").mkdir()
    plugin = awaiting(tmp_path / "plugin")
    server = Server(models.target, arguments, cores=cores(0), environment=plugin)
    server.command[0] = str(python)
    with server:
        until(lambda: state(server)["sidecar"] == "ready")
        programs = {Path(process.cmdline()[0]) for process in server.processes}
        assert programs <= {python, Path("sglang::scheduler"), Path("sglang::detokenizer")}, (
            programs
        )
        text = "The sun is a star because"
        plain = generate(server, text, custom_params={"qspec_enabled": False})
        guessed = generate(server, tagged(text, plain["text"]))
        assert guessed["output_ids"] == plain["output_ids"]
        assert guessed["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 4
        generate(server, text)
        assert of_sidecar(state(server)["accepted_tokens"]) > 0
