"""`qspec batch` against servers that send what SGLang does not: error lines, and it goes on."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.tools.batch import runner
from sglang_qspec.tools.complete import peers
from test.strange_server import (
    PIECE,
    Answer,
    Strange,
    endless,
    response,
    strange,
    strange_responses,
)
from test.tools.batch.fakes import records_of, write_lines

INFO = {"max_running_requests": 8, "internal_states": [{"qspec": {"sidecar": "ready"}}]}
FIGURES: tuple[Any, ...] = ("many", 1.5, -1, 2**70, [], {}, "7")
STREAM = "Content-Type: text/event-stream"
LONG = b"x" * PIECE
ESCAPES = "\x1b]0;owned\x07 \x9b2J refused\nline 7 (x) failed: forged"


def events(*pieces: bytes) -> bytes:
    """A streamed answer."""
    return response(b"".join(b"data: %s\n\n" % piece for piece in pieces), STREAM)


def endless_events(begin: bytes, piece: bytes) -> Iterator[bytes]:
    """A streamed answer without an end, as far as a client can tell."""
    head, *pieces = endless(begin, piece)
    yield head.replace(b"\r\n\r\n", b"\r\n%s\r\n\r\n" % STREAM.encode(), 1)
    yield from pieces


def answer(**fields: Any) -> bytes:
    return response({"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], **fields})


@contextmanager
def serving(info: Any = None) -> Iterator[tuple[Strange, Strange, list[str]]]:
    """A server with an odd answer to some prompts, the server that it redirects to, the prompts."""

    def elsewhere(path: str, body: bytes) -> Answer:
        return answer() if body else response(INFO)

    with ExitStack() as stack:
        other = stack.enter_context(strange(elsewhere))
        odd = dict(strange_responses(other.url + "/v1/completions"))
        odd["escapes"] = lambda: response({"message": ESCAPES}, status="400 Bad Request")
        odd["no choice"] = lambda: response({"choices": []})
        odd["choices of lists"] = lambda: response({"choices": [[1], [2]]})
        for value in FIGURES:
            figures = {"spec_tokens_details": {"spec_verify_ct": value}}
            odd[f"passes {value}"] = partial(answer, sglext=figures)
            usage = {"completion_tokens": value}
            odd[f"tokens {value}"] = partial(answer, usage=usage)
        for name in ("passes []", "passes {}", "tokens []", "tokens {}"):
            del odd[name]  # nothing is no figure
        odd["a stream that ends early"] = lambda: events(b'{"choices": [{"text": "x"}]}')
        odd["a stream without JSON"] = lambda: events(b"{", b"[DONE]")
        odd["a stream of lists"] = lambda: events(b"[]", b"[DONE]")
        odd["a stream of half a pair"] = lambda: events(b'{"choices": [{"text": "\\ud800"}]}')
        odd["an error in a stream"] = lambda: events(b'{"error": {"code": 400}}', b"[DONE]")
        odd["an endless stream"] = lambda: endless_events(
            b"", b'data: {"choices": [{"text": "%s"}]}\n' % LONG
        )
        odd["an endless event"] = lambda: endless_events(b"data: ", LONG)

        def respond(path: str, body: bytes) -> Answer:
            if path == "/server_info":
                return response(INFO) if info is None else info(other.url)
            prompt = json.loads(body)["prompt"] if body else ""
            return odd.get(prompt, answer)()

        yield stack.enter_context(strange(respond)), other, list(odd)


def test_each_strange_answer_is_an_error_line_and_the_batch_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.01)
    output = tmp_path / "out.jsonl"
    with serving() as (server, other, odd):
        good = [f"good {number}" for number in range(10)]
        path = write_lines(tmp_path / "in.jsonl", [*odd, *good])
        given = ["batch", str(path), "--output", str(output), "--url", server.url]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert main([*given, "--in-flight", "4"]) == 3
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        asked = len(server.asked)
        assert main([*given, "--resume"]) == 3
        assert [path for path, _ in server.asked[asked:]] in ([], ["/server_info"])
    assert other.asked == []
    assert max(server.sent) < 2 * peers.MAX_BYTES
    assert {each["custom_id"] for each in records_of(output)} == set(good)
    failed = records_of(tmp_path / "out.errors.jsonl")
    assert sorted(each["custom_id"] for each in failed) == sorted(odd)
    assert grown < 1 << 20  # KiB
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    assert said.replace("\n", "").isprintable()
    assert "\nline 7 (x)" not in said


@pytest.mark.parametrize("name", [name for name in strange_responses("") if "error" not in name])
def test_a_strange_server_info_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["a"])
    with serving(lambda url: strange_responses(url + "/server_info")[name]()) as (server, other, _):
        given = ["batch", str(path), "--output", str(tmp_path / "out"), "--url", server.url]
        assert main(given) == 1
        assert {path for path, _ in server.asked} == {"/server_info"}
    assert other.asked == []
    assert max(server.sent, default=0) < 2 * peers.MAX_BYTES
    said = capsys.readouterr().err
    assert said.startswith("qspec: ")
    assert said.count("\n") == 1
    assert len(said) < 500


def test_a_server_that_streams_more_than_texts_is_asked_without_streams(tmp_path: Path) -> None:
    bodies: list[Any] = []

    def respond(path: str, body: bytes) -> Answer:
        if not body:
            return response(INFO)
        bodies.append(json.loads(body))
        delta = {"reasoning_content": "Hm"}
        piece = json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode()
        return events(piece) if bodies[-1].get("stream") else answer()

    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"messages": [{"content": "a"}]}\n' * 3)
    with strange(respond) as server:
        given = ["batch", str(path), "--output", str(output), "--url", server.url]
        assert main([*given, "--in-flight", "1"]) == 0
    assert [bool(body.get("stream")) for body in bodies] == [True, False, False, False]
    assert [each["custom_id"] for each in records_of(output)] == ["1", "2", "3"]
