"""`qspec batch` against a running server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from sglang_qspec.__main__ import main
from test.engine.server.running import MAX_NEW_TOKENS, state, until
from test.tools.batch.fakes import records_of

pytestmark = pytest.mark.server

GREEDY = {"temperature": 0, "max_tokens": MAX_NEW_TOKENS}
CHATS = 8


def text_of(record: dict[str, Any]) -> str:
    choice = record["response"]["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def counts(server: Server) -> tuple[int, int]:
    """Passes of requests and accepted draft tokens since the server started."""
    found = state(server)
    passes = sum(each["requests"] for each in found["pipelines"].values())
    return passes, sum(found["accepted_tokens"].values())


def test_a_killed_and_continued_batch_has_the_answers_of_plain_requests(
    server: Server, prompts: list[str], expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Raw prompts, chats, a tag and `custom_params`, which change drafts and never an answer."""
    texts = [answer["text"] for answer in expected]
    guess = {"qspec_guesses": [texts[1]]}
    records: list[dict[str, Any]] = [{**GREEDY, "prompt": prompt} for prompt in prompts]
    records[0]["prompt"] = f"{prompts[0]}<NGRAMGUESS>{texts[0]}</NGRAMGUESS>"
    records[1]["custom_params"] = guess
    for number, prompt in enumerate(PROMPTS[:CHATS]):
        body = {**GREEDY, "messages": [{"role": "user", "content": prompt}]}
        chat = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        records.append({**chat, "custom_id": f"chat-{number}"})
    wanted = {str(number): text for number, text in enumerate(texts, 1)}
    wanted |= {f"chat-{number}": texts[number] for number in range(CHATS)}
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["batch", str(path), "--output", str(output), "--url", server.url]
    with subprocess.Popen([sys.executable, "-m", "sglang_qspec", *command]) as process:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5)
        process.kill()
    assert main([*command, "--resume"]) == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert {each["custom_id"]: text_of(each) for each in found} == wanted
    assert len(found) == len(wanted)


def test_a_streamed_answer_has_the_record_of_one_that_is_not_streamed(
    server: Server, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPTS[0]}]}
    lines = [
        {**GREEDY, "prompt": "The sky is", "custom_id": "plain"},
        {**GREEDY, "prompt": [504, 6376, 314], "stop": "e", "custom_id": "ids"},
        {**GREEDY, **chat, "return_spec_tokens_details": True, "custom_id": "chat"},
        {**GREEDY, **chat, "max_tokens": 1, "custom_id": "one token"},
        {**GREEDY, **chat, "logprobs": True, "custom_id": "not streamed"},
        {**GREEDY, "prompt": "The sky is", "logprobs": 1, "n": 2, "custom_id": "two"},
    ]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["batch", str(path), "--output", str(output), "--url", server.url]) == 0
    found = {each["custom_id"]: each["response"]["body"] for each in records_of(output)}
    for line in lines:
        url = "/v1/chat/completions" if "messages" in line else "/v1/completions"
        expected = server.post(url, {key: line[key] for key in line if key != "custom_id"})
        assert _fixed(found[str(line["custom_id"])]) == _fixed(expected)


def _fixed(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without its name, its time, the values of drafting and of the cache."""
    fixed = {key: value for key, value in body.items() if key not in ("id", "created")}
    details = fixed.get("sglext")
    if details is not None:
        fixed["sglext"] = {name: sorted(each) for name, each in details.items()}
    for choice in fixed["choices"]:
        for part in (choice.get("logprobs") or {}).values():  # the last bits depend on the pass
            choice["logprobs"] = type(part), len(part)
    return fixed


def test_answers_of_an_earlier_run_save_passes_and_change_no_answer(
    server: Server, prompts: list[str], tmp_path: Path
) -> None:
    """Greedy and sampled lines get their own answers as guesses, and those of other lines."""
    sampled = {**GREEDY, "temperature": 0.8, "seed": 5}
    lines = [{**way, "prompt": text} for text in prompts[:4] for way in (GREEDY, sampled)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["batch", str(path), "--url", server.url, "--output"]
    assert main([*command, str(tmp_path / "first")]) == 0
    first = {each["custom_id"]: text_of(each) for each in records_of(tmp_path / "first")}
    wrong = tmp_path / "wrong"
    renamed = {str(number): str(number % len(lines) + 1) for number in range(1, len(lines) + 1)}
    wrong.write_text(
        "".join(
            json.dumps({**each, "custom_id": renamed[each["custom_id"]]}) + "\n"
            for each in records_of(tmp_path / "first")
        )
    )
    guesses: list[int] = []
    for number, runs in enumerate(([tmp_path / "first"], [tmp_path / "first", wrong])):
        until(lambda: state(server)["live_requests"] == 0)
        before = state(server)["accepted_tokens"]["guess"]
        given = [word for run in runs for word in ("--guesses-from", str(run))]
        output = tmp_path / f"again-{number}"
        assert main([*command, str(output), *given]) == 0
        assert {each["custom_id"]: text_of(each) for each in records_of(output)} == first
        until(lambda: state(server)["live_requests"] == 0)
        guesses.append(state(server)["accepted_tokens"]["guess"] - before)
    assert min(guesses) > len(lines) * MAX_NEW_TOKENS / 4


def test_the_summary_has_the_figures_of_the_server(
    server: Server, prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until(lambda: state(server)["live_requests"] == 0)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({**GREEDY, "prompt": text}) + "\n" for text in prompts[:4]))
    before = counts(server)
    assert main(["batch", str(path), "--output", str(tmp_path / "o"), "--url", server.url]) == 0
    found = re.search(r"accept length ([\d.]+), (\d+) of (\d+) passes", capsys.readouterr().out)
    assert found is not None
    passes, accepted = int(found[3]) - int(found[2]), int(found[2])
    assert accepted > 0
    # The scheduler counts the last pass after the answer.
    until(lambda: counts(server) == (before[0] + passes, before[1] + accepted))
    assert float(found[1]) == pytest.approx(1 + accepted / passes, abs=0.006)


def test_a_request_that_the_server_refuses_is_in_the_file_of_errors(
    server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    wrong = {"prompt": "Hi", "max_tokens": 4, "custom_params": {"qspec_completions": 0}}
    path.write_text(json.dumps(wrong))
    assert main(["batch", str(path), "--output", str(tmp_path / "o"), "--url", server.url]) == 3
    (record,) = map(json.loads, (tmp_path / "o.errors.jsonl").read_text().splitlines())
    assert record["response"]["status_code"] == 400
    assert "qspec_completions" in json.dumps(record["response"]["body"])
