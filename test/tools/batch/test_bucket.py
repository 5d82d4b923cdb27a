"""Output in an object store: of the command, and of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import BatchError, ConfigError
from sglang_qspec.tools.batch.bucket import Bucket
from test.tools.batch.fake_server import FakeServer
from test.tools.batch.fakes import serving, write_lines
from test.tools.batch.object_store import BUCKET, ObjectStore, object_store
from test.tools.serve_batches.gateway import Gateway, begin, ended, line, upload

URI = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as found:
        yield found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(FakeServer()) as found:
        yield found


def test_an_object_is_that_of_the_file_and_can_be_removed_twice(
    store: ObjectStore, tmp_path: Path
) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"0123456789" * 2_000_000)  # more than one part
    found = Bucket("--output", f"{URI}/folder")
    assert found.put(path, "large") == f"{URI}/folder/large"
    assert store.objects["folder/large"] == path.read_bytes()
    found.remove("large")
    found.remove("large")
    assert "folder/large" not in store.objects


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("uri", ["s3://absent", "s3://", "nothing://answers"])
def test_a_folder_that_cannot_be_used_is_an_error(uri: str) -> None:
    with pytest.raises(ConfigError, match="--output is"):
        Bucket("--output", uri)


def test_a_store_that_has_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with object_store():
        found = Bucket("--output", URI)
    with pytest.raises(BatchError, match="cannot be written"):
        found.put(tmp_path / "file", "file")


def test_the_command_copies_answers_and_failures_at_the_end(
    store: ObjectStore, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "in.jsonl", ["one", "two", "status-400"])
    assert main(["batch", str(path), "--output", f"{URI}/runs/out.jsonl", "--url", url]) == 3
    answers, failures = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    assert len(answers.read_text().splitlines()) == 2
    assert store.objects["runs/out.jsonl"] == answers.read_bytes()
    assert store.objects["runs/out.errors.jsonl"] == failures.read_bytes()


def test_the_service_copies_the_output_and_removes_the_copy_with_the_file(
    store: ObjectStore, url: str, tmp_path: Path
) -> None:
    gateway = Gateway(tmp_path / "folder", "--url", url, "--output-bucket", f"{URI}/service")
    gateway.start()
    try:
        client = gateway.client()
        done = ended(client, begin(client, upload(client, [line("one"), line("two")])).id)
        assert done.output_file_id is not None
        name = f"service/{done.id}_output.jsonl"
        assert store.objects[name] == client.files.content(done.output_file_id).content
        client.files.delete(done.output_file_id)
        assert name not in store.objects
    finally:
        gateway.kill()
