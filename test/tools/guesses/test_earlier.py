"""Answers of earlier runs are found by custom_id and by prompt, and bad files are named."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.guesses.earlier import Earlier, EarlierAnswers
from sglang_qspec.tools.guesses.prompts import COMMON, PromptIndex

WORDS = [f"word{number}" for number in range(3000)]
TEMPLATE = "Answer the question of the user briefly, politely and without any doubt. " * 10


def record(custom_id: str, text: str, status: int = 200) -> str:
    body = {"choices": [{"text": text}], "usage": {"completion_tokens": 1}}
    response = {"status_code": status, "request_id": "r", "body": body}
    return json.dumps({"id": "batch_req_1", "custom_id": custom_id, "response": response})


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a file of lines, and returns its path."""

    def written(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines))
        return path

    return written


def found(runs: list[Earlier], custom_id: str | None, prompt: str = "") -> list[str]:
    with EarlierAnswers.open(runs) as earlier:
        return [guess.text for guess in earlier.find(custom_id, prompt)]


def test_answers_are_found_by_custom_id_the_newest_first(write: Any) -> None:
    runs = [
        Earlier(write(f"{number}", record("a", f"a{number}"), "", record("é", f"é{number}")), None)
        for number in range(6)
    ]
    assert found(runs, "é") == ["é5", "é4", "é3", "é2"]
    assert found(runs[:2], "a") == ["a1", "a0"]
    assert found(runs, "b") == found(runs, None) == []


def test_answers_are_found_by_equal_and_by_similar_prompts(write: Any) -> None:
    chance = random.Random(5)
    prompts = [" ".join(chance.choices(WORDS, k=20)) for _ in range(50)]
    answers = write("answers", *(record(f"{n}", f"answer {n}") for n in range(50)))
    requests = write(
        "requests",
        *(json.dumps({"custom_id": f"{n}", "prompt": each}) for n, each in enumerate(prompts)),
    )
    runs = [Earlier(answers, requests)]
    for number, prompt in enumerate(prompts):
        words = prompt.split()
        words[chance.randrange(20)], words[chance.randrange(20)] = "new", "other"
        assert found(runs, "new", prompt) == [f"answer {number}"]
        assert found(runs, "new", " ".join(words)) == [f"answer {number}"]
    others = [*chance.choices(WORDS, k=18), *prompts[0].split()[:2]]
    assert found(runs, "new", " ".join(others)) == []
    assert found(runs, "1", prompts[1]) == ["answer 1"]
    assert found(runs, "1", prompts[2]) == ["answer 1", "answer 2"]


def test_requests_may_have_any_format_of_a_batch(write: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "a chat"}]}
    body = {
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"content": "b"}]},
    }
    requests = write("requests", json.dumps(chat), json.dumps({**body, "custom_id": "x"}))
    runs = [Earlier(write("answers", record("1", "one"), record("x", "two")), requests)]
    assert found(runs, None, "a chat") == ["one"]
    assert found(runs, None, "b") == ["two"]


def test_a_prompt_belongs_to_the_answers_of_its_own_run(write: Any) -> None:
    requests = write("requests", json.dumps({"prompt": "p"}))
    runs = [Earlier(write("old", record("1", "old")), None)]
    runs.append(Earlier(write("new", record("1", "new")), requests))
    later = write("later requests", json.dumps({"prompt": "q"}))
    runs.append(Earlier(write("later", record("2", "later")), later))
    assert found(runs, None, "p") == ["new"]
    assert found(runs, None, "q") == []


def test_a_common_template_does_not_hide_what_differs() -> None:
    chance = random.Random(6)
    index = PromptIndex()
    prompts = [" ".join(chance.choices(WORDS, k=12)) for _ in range(4 * COMMON)]
    for number, prompt in enumerate(prompts):
        index.add(TEMPLATE + prompt, number)
    right = 0
    for number, prompt in enumerate(prompts):
        words = prompt.split()
        words[chance.randrange(12)] = "new"
        right += index.find(TEMPLATE + " ".join(words)) == number
    assert right > 0.97 * len(prompts)
    assert index.find(TEMPLATE + " ".join(chance.choices(WORDS, k=12))) is None


def test_the_newest_answer_to_an_equal_prompt_counts() -> None:
    index = PromptIndex()
    for number in range(3):
        index.add("?!", number)  # without a word
    assert index.find("?!") == 2
    assert index.find("!?") is None


def test_bad_lines_are_counted_and_the_first_is_named(
    write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answers = write("answers", record("a", "x"), "{", "7", '{"custom_id": "b"}', record("c", "y"))
    requests = write("requests", "[]", json.dumps({"custom_id": "c", "prompt": "p"}))
    assert found([Earlier(answers, requests)], None, "p") == ["y"]
    first, second = caplog.messages
    assert first.startswith(f"{answers}:2: the line is no answer of a batch (3 lines in all)")
    assert second.startswith(f"{requests}:1: the line is no request of a batch (1 lines in all)")


def test_failed_lines_are_no_answers(write: Any, caplog: pytest.LogCaptureFixture) -> None:
    failed = '{"custom_id": "b", "response": null, "error": {}}'
    runs = [Earlier(write("answers", record("a", "no", 400), failed), None)]
    assert found(runs, "a") == found(runs, "b") == []
    assert not caplog.messages


def test_a_file_that_changes_gives_no_guesses(write: Any) -> None:
    path = write("answers", record("a", "x" * 50_000), record("b", "y"))
    with EarlierAnswers.open([Earlier(path, None)]) as earlier:
        os.truncate(path, 1000)
        assert earlier.find("a", "") == earlier.find("b", "") == []


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    try:
        for path, words in (
            (tmp_path / "absent", "absent cannot be read: No such file"),
            (tmp_path, "cannot be read: Is a directory"),
            (pipe, "pipe is a pipe, but guesses need a file"),
        ):
            with pytest.raises(BatchError, match=words):
                EarlierAnswers.open([Earlier(path, None)])
    finally:
        os.close(held)


def test_an_option_names_answers_and_perhaps_requests(tmp_path: Path) -> None:
    assert Earlier.read("a.jsonl") == Earlier(Path("a.jsonl"), None)
    assert Earlier.read("a.jsonl,b.jsonl") == Earlier(Path("a.jsonl"), Path("b.jsonl"))
    odd = tmp_path / "a,b"
    odd.touch()
    assert Earlier.read(str(odd)) == Earlier(odd, None)
    for text in ("", ",b"):
        with pytest.raises(ValueError, match="ANSWERS or ANSWERS,REQUESTS"):
            Earlier.read(text)
