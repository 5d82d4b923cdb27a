"""The files of answers and failures: their records, and how a later run continues them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.batch.line import Line, parse
from sglang_qspec.batch.results import Results
from sglang_qspec.batch.server import Reply, Verdict
from sglang_qspec.errors import BatchError
from test.batch.fakes import records_of

ANSWER = Reply(Verdict.ANSWERED, 200, b'{"choices":[]}', request_id="r")


def line(number: int) -> Line:
    return parse(number, b'{"prompt": "a"}')


def opened(folder: Path, *, resume: bool = False) -> Results:
    return Results.open(folder / "out.jsonl", folder / "errors.jsonl", resume=resume)


def test_records_have_openai_s_fields(tmp_path: Path) -> None:
    refused = Reply(Verdict.REFUSED, 400, b'{"message":"no"}', "HTTP 400: no")
    broken = Reply(Verdict.FAILED, reason="the connection broke")
    with opened(tmp_path) as results:
        results.answer(line(1), ANSWER)
        results.fail(line(2), refused)
        results.fail(line(3), broken)
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
        results.answer(line(1), ANSWER)
        assert len(records_of(tmp_path / "out.jsonl")) == 1


def test_a_file_of_errors_without_a_record_is_removed(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("name", ["out.jsonl", "errors.jsonl"])
def test_records_are_kept_only_with_resume(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as results:
        results.answer(line(1), ANSWER)
        results.fail(line(2), Reply(Verdict.FAILED, reason="x"))
    other = "errors.jsonl" if name == "out.jsonl" else "out.jsonl"
    (tmp_path / other).unlink()
    with pytest.raises(BatchError, match=f"{name} exists; --resume asks the lines that it lacks"):
        opened(tmp_path)
    with opened(tmp_path, resume=True) as results:
        assert len(results.answered) == 1
        assert results.failed == (name == "errors.jsonl")


@pytest.mark.parametrize("kept", range(1, 40, 6))
def test_a_torn_last_line_is_cut(tmp_path: Path, kept: int) -> None:
    with opened(tmp_path) as results:
        results.answer(line(1), ANSWER)
        results.answer(line(2), ANSWER)
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[: first + kept])
    with opened(tmp_path, resume=True) as results:
        assert "1" in results.answered
        assert "2" not in results.answered
        results.answer(line(2), ANSWER)
    assert path.read_bytes() == whole


def test_a_last_line_without_its_end_is_cut_although_it_is_json(tmp_path: Path) -> None:
    with opened(tmp_path) as results:
        results.answer(line(1), ANSWER)
    path = tmp_path / "out.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with opened(tmp_path, resume=True) as results:
        assert len(results.answered) == 0
    assert path.read_bytes() == b""


def test_zeros_that_a_power_failure_left_are_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as results:
        results.answer(line(1), ANSWER)
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(4096))
    with opened(tmp_path, resume=True) as results:
        assert len(results.answered) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('7\n{"custom_id": "1"}\n', "out.jsonl:1: the line is no record of qspec batch"),
        ('{"custom_id": "1"}\n{"custom_id": "1"}\n', "out.jsonl:2: custom_id '1' has a record"),
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


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="none/out.jsonl cannot be written: No such file"):
        opened(tmp_path / "none")


def test_line_ends_in_an_answer_do_not_end_the_record(tmp_path: Path) -> None:
    body = json.dumps({"choices": [{"text": "one\ntwo\u2028three"}]}).encode()
    with opened(tmp_path) as results:
        results.answer(line(1), Reply(Verdict.ANSWERED, 200, body))
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 1
