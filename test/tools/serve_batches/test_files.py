"""The folder of the service: whole files or none, and nothing that a killed service left."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.serve_batches.files import Files


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    found = Files(tmp_path)
    yield found
    found.close()


class Torn(io.BytesIO):
    """An upload that breaks."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError(28, "No space left on device")
        return super().read(3)


def names(folder: Path) -> set[str]:
    """All files below a folder but the lock."""
    return {path.name for path in folder.rglob("*") if path.is_file()} - {"lock"}


def test_a_file_is_kept_whole_or_not_at_all(files: Files, tmp_path: Path) -> None:
    files.write("file-1", io.BytesIO(b"content"))
    assert files.path("file-1").read_bytes() == b"content"
    with pytest.raises(OSError, match="No space"):
        files.write("file-2", Torn(b"content"))
    assert names(tmp_path) == {"file-1"}
    files.remove("file-1")
    files.remove("file-1")
    assert not names(tmp_path)


def test_records_become_a_file_once(files: Files) -> None:
    path, _ = files.records("batch_1")
    path.write_bytes(b"records")
    assert files.keep(path, "file-1") == 7
    assert files.keep(path, "file-1") == 7  # a killed service may do it again
    assert files.path("file-1").read_bytes() == b"records"
    assert files.keep(path, "file-2") == 0


def test_the_start_keeps_files_and_records_that_are_needed(files: Files, tmp_path: Path) -> None:
    for id in ("file-1", "file-2"):
        files.write(id, io.BytesIO(b"x"))
    for id in ("batch_1", "batch_2"):
        for path in files.records(id):
            path.write_bytes(b"x")
    (tmp_path / "incoming" / "torn").write_bytes(b"x")
    files.sweep({"file-1"}, {"batch_1"})
    assert names(tmp_path) == {"file-1", "batch_1.jsonl", "batch_1.errors.jsonl"}


def test_nobody_else_reads_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    Files(folder).close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes.pop("lock") == 0o600
    assert set(modes.values()) == {0o700}


def test_one_service_uses_a_folder(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another service"):
        Files(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        Files(tmp_path / "lock" / "below")


def test_gateways_of_one_database_share_a_folder(tmp_path: Path) -> None:
    first = Files(tmp_path, is_shared=True)
    assert first.is_alone
    first.share()
    second = Files(tmp_path, is_shared=True)
    assert not second.is_alone
    assert first.identity() == second.identity()
    assert first.partial("gateway_1") != second.partial("gateway_2")
    first.close()
    with pytest.raises(ConfigError, match="needs its --database"):
        Files(tmp_path)
    second.close()
    third = Files(tmp_path, is_shared=True)
    assert third.is_alone
    third.close()


def test_a_gateway_waits_until_the_first_one_has_swept(tmp_path: Path) -> None:
    first = Files(tmp_path, is_shared=True)
    timer = threading.Timer(0.3, first.share)
    timer.start()
    second = Files(tmp_path, is_shared=True)
    assert not second.is_alone
    timer.join()
    for each in (first, second):
        each.close()


def test_the_folder_of_a_service_alone_is_not_shared(files: Files, tmp_path: Path) -> None:
    (tmp_path / "state.db").touch()
    with pytest.raises(ConfigError, match="without --database"):
        Files(tmp_path, is_shared=True)


def test_the_start_keeps_the_texts_that_another_gateway_has_left(tmp_path: Path) -> None:
    shared = Files(tmp_path, is_shared=True)
    for id in ("gateway_1", "gateway_2"):
        shared.partial(id).touch()
    shared.sweep((), (), ["gateway_2"])
    assert names(tmp_path) == {"gateway_2.partial.jsonl"}
    shared.close()
