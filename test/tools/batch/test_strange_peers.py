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
from test.strange_server import Answer, Strange, response, strange, strange_responses
from test.tools.batch.fakes import records_of, write_lines

INFO = {"max_running_requests": 8, "internal_states": [{"qspec": {"sidecar": "ready"}}]}
FIGURES: tuple[Any, ...] = ("many", 1.5, -1, 2**70, [], {}, "7")
ESCAPES = "\x1b]0;owned\x07 \x9b2J refused\nline 7 (x) failed: forged"


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
