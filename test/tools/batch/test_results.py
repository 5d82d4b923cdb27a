"""The files of answers and failures: their records, and how a later run continues them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.batch import results as module
from sglang_qspec.tools.batch.line import Line, parse
from sglang_qspec.tools.batch.results import Results
from sglang_qspec.tools.batch.server import Reply, ReplyKind
from test.strange_server import DEEP
from test.tools.batch.fakes import records_of

ANSWER = Reply(ReplyKind.ANSWERED, 200, b'{"choices":[]}', request_id="r")


def line(number: int) -> Line:
    return parse(number, b'{"prompt": "a"}')


def opened(folder: Path, *, resume: bool = False) -> Results:
    return Results.open(folder / "out.jsonl", folder / "errors.jsonl", resume=resume)


def test_records_have_openai_s_fields(tmp_path: Path) -> None:
    refused = Reply(ReplyKind.REFUSED, 400, b'{"message":"no"}', "HTTP 400: no")
    broken = Reply(ReplyKind.FAILED, reason="the connection broke")
    with opened(tmp_path) as results:
        results.write(line(1), ANSWER)
        results.write(line(2), refused)
        results.write(line(3), broken)
    (answer,) = records_of(tmp_path / "out.jsonl")
    response: dict[str, Any] = {"status_code": 200, "request_id": "r", "body": {"choices": []}}
    assert answer.pop("id")
    assert answer == {"custom_id": "1", "response": response, "error": None}
    first, second = records_of(tmp_path / "errors.jsonl")
    assert first["response"]["status_code"] == 400
    assert first["response"]["body"] == {"message": "no"}
    assert first["error"] is None
    assert second["response"] is None
    assert second["error"] == {"code": "failed", "message": "the connection broke"}


def test_a_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as results:
        results.write(line(1), ANSWER)
        assert len(records_of(tmp_path / "out.jsonl")) == 1


def test_a_file_of_errors_without_a_record_is_removed(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_file_of_errors_that_is_no_regular_file_stays(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "empty")
    os.mkfifo(pipe)
    for errors in (link, pipe):
        Results.open(tmp_path / "out.jsonl", errors, resume=False).close()
        assert errors.exists()


def test_only_a_refused_line_has_no_error(tmp_path: Path) -> None:
    with opened(tmp_path) as results:
        results.write(line(1), Reply(ReplyKind.BUSY, 429, b"{}", "HTTP 429: too many requests"))
    (record,) = records_of(tmp_path / "errors.jsonl")
    assert record["error"]["message"] == "HTTP 429: too many requests"


@pytest.mark.parametrize("name", ["out.jsonl", "errors.jsonl"])
def test_records_are_kept_only_with_resume(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as results:
        results.write(line(1), ANSWER)
        results.write(line(2), Reply(ReplyKind.FAILED, reason="x"))
    other = "errors.jsonl" if name == "out.jsonl" else "out.jsonl"
    (tmp_path / other).unlink()
    with pytest.raises(BatchError, match=f"{name} exists; --resume asks the lines that it lacks"):
        opened(tmp_path)
    with opened(tmp_path, resume=True) as results:
        assert len(results.answered) == 1
        assert results.failed == (name == "errors.jsonl")


@pytest.mark.parametrize("lines", [1, 2])
@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_torn_last_line_is_cut(tmp_path: Path, kept: int, lines: int) -> None:
    with opened(tmp_path) as results:
        for number in range(1, lines + 1):
            results.write(line(number), ANSWER)
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1 if lines > 1 else 0
    path.write_bytes(whole[: last + kept])
    with opened(tmp_path, resume=True) as results:
        assert len(results.answered) == lines - 1
        assert str(lines) not in results.answered
        results.write(line(lines), ANSWER)
    assert path.read_bytes() == whole


def test_a_last_line_without_its_end_is_cut_although_it_is_json(tmp_path: Path) -> None:
    with opened(tmp_path) as results:
        results.write(line(1), ANSWER)
    path = tmp_path / "out.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with opened(tmp_path, resume=True) as results:
        assert len(results.answered) == 0
    assert path.read_bytes() == b""


def test_zeros_that_a_power_failure_left_are_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as results:
        results.write(line(1), ANSWER)
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(4096))
    with opened(tmp_path, resume=True) as results:
        assert len(results.answered) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [
        bytes(30_000),
        b"\xff\xfe" * 20,
        b'{"id":"batch_req_1","custom_id":"\xff","response":{}}\n' * 2,
        DEEP + b"\n7\n",
        b'{"custom_id":"1","response":' + DEEP + b"}\n",
        b'{"id":"batch_req_1","cust\n{"custom_id":"1","response":{}}\n',
        b'{"custom_id":"1","response":"' + b"x" * 30_000 + b'"}\n',
        b"\n" * 5,
    ],
    ids=lambda content: repr(content[:20]),
)
def test_rubbish_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(module, "MAX_RECORD_BYTES", 20_000)
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchError, match="the line is no record of qspec batch"):
        opened(tmp_path, resume=True)
    assert path.read_bytes() == content


def test_what_is_no_file_cannot_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.mkdir()
    with pytest.raises(BatchError, match="cannot be written: Is a directory"):
        opened(tmp_path, resume=True)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(BatchError, match="is no file, so --resume cannot read its records"):
        opened(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('7\n{"custom_id": "1"}\n', "out.jsonl:1: the line is no record of qspec batch"),
        (2 * '{"custom_id":"1","response":{}}\n', "out.jsonl:2: custom_id '1' has a record"),
        ('{"custom_id": "1", "prompt": "an input"}\n', "out.jsonl:1: the line is no record"),
        ("Notes of one line", "out.jsonl:1: the line is no record"),
    ],
)
def test_a_file_that_is_no_output_is_refused_and_kept(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(BatchError, match=words):
        opened(tmp_path, resume=True)
    assert path.read_text() == content


def test_two_runs_cannot_write_the_same_file(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(BatchError, match="another process writes .*out.jsonl"):
        opened(tmp_path, resume=True)


def test_a_refused_run_keeps_the_file_of_errors_of_another_run(tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    with opened(tmp_path) as results:
        with pytest.raises(BatchError, match="another process writes .*errors.jsonl"):
            Results.open(tmp_path / "other.jsonl", errors, resume=False)
        results.write(line(1), Reply(ReplyKind.FAILED, reason="x"))
    assert len(records_of(errors)) == 1


def test_no_run_begins_while_another_one_closes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = opened(tmp_path)
    unlink = Path.unlink

    def begin(path: Path, *, missing_ok: bool) -> None:
        with pytest.raises(BatchError, match="another process writes .*out.jsonl"):
            opened(tmp_path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", begin)
    results.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    with opened(tmp_path) as results:
        results.write(line(1), ANSWER)
    assert len(records_of(tmp_path / "out.jsonl")) == 1
    assert "out.jsonl cannot be locked (Function not implemented); start no other" in caplog.text


def test_a_record_that_the_disk_takes_in_part_is_taken_back(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "out.jsonl"
    with opened(tmp_path) as results:
        results.write(line(1), ANSWER)
        whole = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 9, limit[1]))
        try:
            with pytest.raises(BatchError, match="out.jsonl cannot be written: File too large"):
                results.write(line(2), ANSWER)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert path.read_bytes() == whole


def test_records_that_the_disk_loses_later_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))  # as for a pipe
    opened(tmp_path).close()
    monkeypatch.setattr(os, "fsync", failing(errno.EDQUOT))
    results = opened(tmp_path)
    with pytest.raises(BatchError, match="out.jsonl cannot be written: Disk quota exceeded"):
        results.close()
    monkeypatch.undo()
    opened(tmp_path).close()  # both files were closed


def failing(number: int) -> Callable[..., None]:
    """A system call that fails with this error."""

    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="none/out.jsonl cannot be written: No such file"):
        opened(tmp_path / "none")


def test_line_ends_in_an_answer_do_not_end_the_record(tmp_path: Path) -> None:
    body = json.dumps({"choices": [{"text": "one\ntwo\u2028three"}]}).encode()
    with opened(tmp_path) as results:
        results.write(line(1), Reply(ReplyKind.ANSWERED, 200, body))
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 1
