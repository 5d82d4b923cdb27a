"""`qspec complete` against a running server."""

import json
import re
from pathlib import Path

import pytest

from benchmark.harness.server import Server
from sglang_qspec.__main__ import main
from test.engine.server.running import generate, state, until

pytestmark = pytest.mark.server

PROMPT = "Repeat after me: 你好, naïve café 🙂🙂! 你好, naïve café 🙂🙂! 你好, naïve"
OPTIONS = ["--max-new-tokens", "24"]


def test_it_prints_the_text_and_nothing_else(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = generate(server, PROMPT, max_new_tokens=24)["text"]
    assert main(["complete", "--url", server.url, *OPTIONS, PROMPT]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected + "\n"
    assert captured.err == ""


def test_it_marks_drafted_text_and_counts_its_tokens(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """Characters of the text have several bytes, and some of them several tokens."""
    expected = generate(server, PROMPT, max_new_tokens=24)["text"]
    tagged = f"{PROMPT}<NGRAMGUESS>{expected}</NGRAMGUESS>"
    assert main(["complete", "--url", server.url, "--show-drafts", *OPTIONS, tagged]) == 0
    text, _, counts = capsys.readouterr().out.rstrip("\n").rpartition("\n\n")
    marks = re.compile(r"\[(queue|step|guess|prompt|output):(.*?)\]", re.DOTALL)
    assert marks.sub(r"\2", text) == expected
    assert marks.search(text) is not None
    found = re.match(r"24 tokens in \d+ passes: ", counts)
    assert found is not None
    numbers = [int(part.split()[0]) for part in counts[found.end() :].split(", ")]
    assert sum(numbers) == 24


def test_the_answer_of_an_earlier_batch_is_a_guess(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = generate(server, PROMPT, max_new_tokens=24)["text"]
    answers, requests = tmp_path / "answers", tmp_path / "requests"
    body = {"choices": [{"text": expected}]}
    answers.write_text(json.dumps({"custom_id": "a", "response": {"body": body}}))
    requests.write_text(json.dumps({"custom_id": "a", "prompt": PROMPT}))
    until(lambda: state(server)["live_requests"] == 0)
    before = state(server)["accepted_tokens"]["guess"]
    given = ["--guesses-from", f"{answers},{requests}"]
    assert main(["complete", "--url", server.url, *given, *OPTIONS, PROMPT]) == 0
    assert capsys.readouterr().out == expected + "\n"
    until(lambda: state(server)["accepted_tokens"]["guess"] > before)


def test_a_refusal_of_the_server_is_one_sentence(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", "--url", server.url, "a <NGRAMGUESS>b"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"qspec: .*HTTP 400.*never closed.*\n", captured.err)
