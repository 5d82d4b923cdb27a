"""A cached folder is complete or absent, and is built only once."""

import threading
from pathlib import Path

import pytest

from sglang_qspec.tools.models.cache import (
    MANIFEST,
    build_folder,
    cache_folder,
    cached,
    is_complete,
)


def fill(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "weights").write_bytes(b"0123456789")
    (folder / "config.json").write_text("{}")


def never(folder: Path) -> None:
    pytest.fail(f"{folder} is built again")


def test_a_folder_is_built_on_the_first_use_and_found_on_the_second(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", fill)
    assert (folder / "inner" / "weights").read_bytes() == b"0123456789"
    assert build_folder(folder, never) == folder


@pytest.mark.parametrize("name", ["inner/weights", "config.json", MANIFEST])
def test_a_folder_with_a_missing_file_is_built_again(tmp_path: Path, name: str) -> None:
    folder = build_folder(tmp_path / "model", fill)
    (folder / name).unlink()
    build_folder(folder, fill)
    assert is_complete(folder)


def test_a_folder_with_a_changed_byte_is_built_again(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "model", fill)
    (folder / "inner" / "weights").write_bytes(b"0123456780")
    assert not is_complete(folder)
    build_folder(folder, fill)
    assert (folder / "inner" / "weights").read_bytes() == b"0123456789"


@pytest.mark.parametrize(
    "manifest",
    [
        b"[]",
        b"7",
        b'["config.json"]',
        b'{"config.json": 2}',
        b'{"config.json": {"bytes": 2}}',
        b'{"config.json": [2, "hash"]}',
        b'{"inner": {"bytes": 4096, "sha256": ""}}',
        b'{"config.json/x": {"bytes": 2, "sha256": ""}}',
        b'{"con',
        b"\xff\xfe",
        b"",
    ],
)
def test_a_folder_with_a_damaged_manifest_is_built_again(tmp_path: Path, manifest: bytes) -> None:
    folder = build_folder(tmp_path / "model", fill)
    (folder / MANIFEST).write_bytes(manifest)
    assert not is_complete(folder)
    build_folder(folder, fill)
    assert is_complete(folder)


def test_a_folder_that_cannot_be_read_is_an_error_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_folder(tmp_path / "model", fill)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError("closed")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(PermissionError, match="closed"):
        is_complete(folder)


def test_a_failed_build_leaves_no_folder_of_that_name(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_folder(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]


def test_the_next_build_removes_the_files_of_a_killed_one(tmp_path: Path) -> None:
    abandoned = tmp_path / ".model.tmp-killed"
    abandoned.mkdir()
    (abandoned / "half").write_text("half")
    build_folder(tmp_path / "model", fill)
    assert not abandoned.exists()


def test_simultaneous_builds_of_one_folder_run_once(tmp_path: Path) -> None:
    builds = []
    barrier = threading.Barrier(4)

    def count(folder: Path) -> None:
        builds.append(folder)
        fill(folder)

    def use() -> None:
        barrier.wait()
        build_folder(tmp_path / "model", count)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert is_complete(tmp_path / "model")


def test_a_different_recipe_has_a_different_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_QSPEC_CACHE", str(tmp_path))
    eight = cached("model", {"bits": 8}, fill)
    four = cached("model", {"bits": 4}, fill)
    assert eight != four
    assert cached("model", {"bits": 8}, never) == eight
    assert eight.parent == tmp_path


def test_the_environment_sets_the_cache_folder() -> None:
    assert cache_folder({"SGLANG_QSPEC_CACHE": "/a/b"}) == Path("/a/b")
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/sglang-qspec")
    assert cache_folder({}) == Path.home() / ".cache" / "sglang-qspec"
