"""`qspec batch` against a fake server in a thread: options, output, exit status, messages."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.tools.batch import own_server, progress
from test.tools.batch.fake_server import HALF, MAX_GUESS_TOKENS, FakeServer, text_of
from test.tools.batch.fakes import (
    ROOT,
    assert_complete,
    records_of,
    serving,
    write_lines,
)

PROMPTS = [f"prompt {i}" for i in range(40)]


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def url(fake: FakeServer) -> Iterator[str]:
    with serving(fake) as address:
        yield address


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An input of PROMPTS."""
    return write_lines(tmp_path / "in.jsonl", PROMPTS)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def batch(*arguments: str | Path) -> int:
    return main(["batch", *map(str, arguments)])


def test_all_lines_are_answered_and_the_summary_says_so(
    tmp_path: Path, path: Path, url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(path, "--output", output, "--url", url) == 0
    assert_complete(output, PROMPTS)
    assert not (tmp_path / "out.errors.jsonl").exists()
    figures = r"160 tokens, [\d.]+ tokens/s, accept length 2.00, 80 of 160 passes saved"
    words = rf"40 lines answered, 0 failed in [\d.]+ s: {figures}\n"
    assert re.fullmatch(words, capsys.readouterr().out)


def test_both_endpoints_are_asked(tmp_path: Path, url: str, output: Path) -> None:
    path = tmp_path / "in.jsonl"
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    path.write_text("\n".join(map(json.dumps, [chat, {"prompt": "Ho"}])))
    assert batch(path, "--output", output, "--url", url) == 0
    bodies = {each["custom_id"]: each["response"]["body"] for each in records_of(output)}
    assert bodies["1"]["choices"][0]["message"]["role"] == "assistant"
    assert bodies["2"]["choices"][0]["text"].startswith("answer ")


def test_the_server_has_as_many_lines_as_it_runs_and_64_more(tmp_path: Path, output: Path) -> None:
    fake = FakeServer(delay=1.0, slots=3)
    path = write_lines(tmp_path / "in.jsonl", [f"prompt {i}" for i in range(100)])
    with serving(fake) as url:
        assert batch(path, "--output", output, "--url", url) == 0
    assert fake.most == 3 + 64


def test_more_lines_than_open_files_can_be_in_flight(tmp_path: Path, output: Path) -> None:
    prompts = [f"prompt {i}" for i in range(120)]
    path = write_lines(tmp_path / "in.jsonl", prompts)
    limited = 'ulimit -Sn 80; exec "$@"'
    options = [str(path), "--output", str(output), "--in-flight", "100"]
    with serving(FakeServer(delay=0.5)) as url:
        command = [sys.executable, "-m", "sglang_qspec", "batch", *options, "--url", url]
        done = subprocess.run(
            ["bash", "-c", limited, "-", *command],
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert_complete(output, prompts)


def test_in_flight_limits_the_lines_at_the_server(path: Path, output: Path) -> None:
    fake = FakeServer(delay=0.2)
    with serving(fake) as url:
        assert batch(path, "--output", output, "--url", url, "--in-flight", "5") == 0
    assert fake.most == 5
    assert sorted(fake.order) == sorted(PROMPTS)


def test_lines_are_sent_in_the_order_of_the_file(path: Path, output: Path) -> None:
    # Of several lines in flight, a later one may reach the server before an earlier one.
    fake = FakeServer()
    with serving(fake) as url:
        assert batch(path, "--output", output, "--url", url, "--in-flight", "1") == 0
    assert fake.order == PROMPTS


def test_failed_lines_are_in_a_file_of_their_own_and_the_status_is_3(
    tmp_path: Path, fake: FakeServer, url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ["status-400", "status-500", "abort"]
    path = write_lines(tmp_path / "in.jsonl", [*PROMPTS, *bad, "flaky-2"])
    assert batch(path, "--output", output, "--url", url) == 3
    assert_complete(output, [*PROMPTS, "flaky-2"])
    errors = tmp_path / "out.errors.jsonl"
    assert sorted(each["custom_id"] for each in records_of(errors)) == sorted(bad)
    assert [fake.asked[prompt] for prompt in bad] == [1, 3, 3]
    captured = capsys.readouterr()
    assert f"3 failed lines are in {errors}\n" in captured.out
    # The same command asks none of them again, and still tells.
    assert batch(path, "--output", output, "--url", url, "--resume") == 3
    assert [fake.asked[prompt] for prompt in bad] == [1, 3, 3]
    # Without the file of errors it does.
    errors.unlink()
    assert batch(path, "--output", output, "--url", url, "--resume") == 3
    assert [fake.asked[prompt] for prompt in bad] == [2, 6, 6]


def test_resume_asks_only_the_lines_without_a_record(
    path: Path, fake: FakeServer, url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(path, "--output", output, "--url", url, "--resume") == 0
    kept = output.read_bytes().splitlines(keepends=True)[:15]
    output.write_bytes(b"".join(kept) + b'{"id": "batch_req')
    before = fake.asked.total()
    assert batch(path, "--output", output, "--url", url, "--resume") == 0
    assert fake.asked.total() - before == 25
    assert output.read_bytes().startswith(b"".join(kept))
    assert_complete(output, PROMPTS)
    assert "25 lines answered, 0 failed (15 more were settled before)" in capsys.readouterr().out


def test_an_answer_that_is_cut_is_a_guess_of_the_next_attempt(
    path: Path, fake: FakeServer, url: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stalled answer ends by its time limit, and in the next process by its kill."""
    write_lines(path, ["stall-1", "b"])
    assert batch(path, "--output", output, "--url", url, "--timeout", "1") == 0
    text = text_of("stall-1")[:HALF]
    assert fake.guesses == {"stall-1": [[], [text]], "b": [[]]}
    assert_complete(output, ["stall-1", "b"])
    assert not output.with_suffix(".partial.jsonl").exists()


def test_resume_sends_what_a_killed_process_had_of_its_answers(
    path: Path, fake: FakeServer, url: str, output: Path
) -> None:
    write_lines(path, ["stall-1", "b"])
    command = [sys.executable, "-m", "sglang_qspec", "batch", str(path), "--output", str(output)]
    partial = output.with_suffix(".partial.jsonl")
    with subprocess.Popen([*command, "--url", url], cwd=ROOT) as process:
        while not partial.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert batch(path, "--output", output, "--url", url, "--resume") == 0
    assert fake.guesses == {"stall-1": [[], [text_of("stall-1")[:HALF]]], "b": [[]]}
    assert_complete(output, ["stall-1", "b"])
    assert not partial.exists()


def test_an_earlier_run_gives_guesses(
    tmp_path: Path, path: Path, fake: FakeServer, url: str, output: Path
) -> None:
    long = "x" * (MAX_GUESS_TOKENS + 1)
    old = [(PROMPTS[0], "old answer"), ("other", "found by its prompt"), (PROMPTS[1], long)]
    answers, requests = tmp_path / "old.jsonl", tmp_path / "old-requests.jsonl"
    body = {"choices": [{"text": "%s"}], "usage": {"completion_tokens": 3}}
    line = json.dumps({"custom_id": "%s", "response": {"status_code": 200, "body": body}})
    answers.write_text("".join(line % (name, text) + "\n" for name, text in old))
    requests.write_text(json.dumps({"custom_id": "other", "prompt": "a prompt of some words"}))
    write_lines(path, [*PROMPTS[:3], "a prompt of some  words"])
    runs = ["--guesses-from", f"{answers},{requests}"]
    assert batch(path, "--output", output, "--url", url, *runs) == 0
    assert_complete(output, [*PROMPTS[:3], "a prompt of some  words"])
    assert fake.guesses == {
        PROMPTS[0]: [["old answer"]],
        PROMPTS[1]: [[long], []],  # the server has refused it
        PROMPTS[2]: [[]],
        "a prompt of some  words": [["found by its prompt"]],
    }


def test_an_earlier_run_that_is_absent_stops_the_batch(
    path: Path, fake: FakeServer, url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(path, "--output", output, "--url", url, "--guesses-from", "absent") == 1
    assert "qspec: absent cannot be read: No such file or directory" in capsys.readouterr().err
    assert not fake.asked


def test_an_output_with_records_is_refused_without_resume(
    path: Path, fake: FakeServer, url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(path, "--output", output, "--url", url) == 0
    whole = output.read_bytes()
    assert batch(path, "--output", output, "--url", url) == 1
    words = f"qspec: {output} exists; --resume asks the lines that it lacks, or remove it first\n"
    assert capsys.readouterr().err.endswith(words)
    assert output.read_bytes() == whole
    assert fake.asked.total() == len(PROMPTS)


def test_bad_lines_stop_the_batch_before_a_server_is_asked(
    tmp_path: Path,
    fake: FakeServer,
    url: str,
    output: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 7}\n')
    assert batch(path, "--output", output, "--url", url) == 1
    assert "line 2: prompt is 7, but must be a text" in capsys.readouterr().err
    assert not fake.asked
    assert batch(path, "--output", output, "--url", url, "--skip-invalid") == 0
    assert "left out: line 2: prompt is 7" in caplog.text
    assert fake.order == ["a"]


def test_standard_input_is_read_as_it_comes(tmp_path: Path, url: str, output: Path) -> None:
    """The answer to the first line is there before the second line is."""
    command = [sys.executable, "-m", "sglang_qspec", "batch", "-", "--output", str(output)]
    with subprocess.Popen(
        [*command, "--url", url], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"prompt": "a"}\n')
        process.stdin.flush()
        while not (output.exists() and output.read_bytes()):
            assert process.poll() is None
            time.sleep(0.01)
        process.stdin.write(b'{"prompt": "b"}\n{"prompt": 7}\n{"prompt": "c"}\n')
        process.stdin.close()
        assert process.stderr is not None
        words = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert "the input has a bad line: line 3: prompt is 7" in words
    assert [each["custom_id"] for each in records_of(output)] == ["1", "2"]


def test_a_pipe_is_read_once(tmp_path: Path, url: str, output: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: write_lines(pipe, PROMPTS))
    writer.start()
    assert batch(pipe, "--output", output, "--url", url) == 0
    writer.join()
    assert_complete(output, PROMPTS)


def test_an_input_that_shrinks_meanwhile_is_an_error(
    path: Path, fake: FakeServer, url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.on_info = lambda: path.write_text(path.read_text()[: len(path.read_text()) // 2 + 1])
    assert batch(path, "--output", output, "--url", url, "--skip-invalid") == 1
    assert f"{path} has changed since the batch began" in capsys.readouterr().err


def test_two_servers_share_the_lines(tmp_path: Path, output: Path) -> None:
    fakes = [FakeServer(delay=0.005) for _ in range(2)]
    prompts = [f"prompt {i}" for i in range(400)]
    path = write_lines(tmp_path / "in.jsonl", prompts)
    with serving(fakes[0]) as one, serving(fakes[1]) as two:
        assert batch(path, "--output", output, "--url", one, "--url", two) == 0
    assert_complete(output, prompts)
    assert min(fake.asked.total() for fake in fakes) > 100


def test_outputs_with_different_names_have_different_files_of_errors(
    tmp_path: Path, url: str
) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["status-400"])
    for name in ("llama-3.1", "llama-3.2"):
        assert batch(path, "--output", tmp_path / name, "--url", url) == 3
        assert len(records_of(tmp_path / f"{name}.errors.jsonl")) == 1


def test_an_interrupt_before_the_start_of_a_server_is_no_traceback(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(own_server, "launch_settings", interrupted)
    path = write_lines(tmp_path / "in.jsonl", ["a"])
    assert batch(path, "--output", output) == 128 + signal.SIGINT


def test_an_answer_that_takes_too_long_fails(
    tmp_path: Path, url: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["hang", "b"])
    assert batch(path, "--output", output, "--url", url, "--timeout", "1") == 3
    (record,) = records_of(tmp_path / "out.errors.jsonl")
    assert record["error"] == {"code": "failed", "message": "no answer in 1 s"}
    assert_complete(output, ["b"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1: Connection"),
        (["--url", "http://none.invalid"], "no server answers at http://none.invalid: Cannot"),
        (["--url", "nonsense"], "--url is 'nonsense', but must be the URL of an SGLang server"),
        (["--url", "u", "--url", "u"], "--url has the same address twice"),
        (["--url", "u", "--model", "m"], "--model is for the command's own server"),
        (["--url", "u", "--", "--tp-size", "2"], "flags after -- is for the command's own"),
        (["--url", "http://me:secret@127.0.0.1:1"], "no server answers at http://127.0.0.1:1: Con"),
        (["--output", ""], ". cannot be written: Is a directory"),
        (["--draft-model", "m"], "--draft-model needs --model"),
        (
            ["--url", "u", "--errors", "in.jsonl"],
            "INPUT, --output and --errors must be different files",
        ),
    ],
)
def test_options_that_cannot_be_used_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", ["a"])
    assert batch("in.jsonl", "--output", "out.jsonl", *options) == 1
    assert f"qspec: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["s3://bucket/in.jsonl", "in.parquet", "."])
def test_an_input_that_only_ray_reads_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert batch(name, "--output", "out.jsonl") == 1
    words = f"qspec: INPUT is {name!r}; URIs, folders and Parquet files need --ray\n"
    assert capsys.readouterr().err == words


def test_without_ray_its_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", ["a"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert batch("in.jsonl", "--output", "out.jsonl", "--ray", "local") == 1
    assert "pip install 'sglang-qspec[ray]'" in capsys.readouterr().err


def test_a_terminal_gets_a_bar(
    path: Path, url: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert batch(path, "--output", output, "--url", url) == 0
    last = terminal.getvalue().rstrip().rpartition("\r")[2]
    assert "40/40" in last
    assert "accept length 2.00" in last


def test_a_log_gets_a_line_at_intervals(
    path: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.1)
    caplog.set_level("INFO")
    with serving(FakeServer(delay=0.1)) as url:
        assert batch(path, "--output", output, "--url", url, "--in-flight", "4") == 0
    assert re.search(r"\d+ of 40 lines, 0 failed, \d+ tokens, [\d.]+ tokens/s, accept", caplog.text)


def test_output_on_a_full_disk_is_one_sentence(
    tmp_path: Path, path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    assert batch(path, "--output", "/dev/full", "--errors", tmp_path / "e", "--url", url) == 1
    assert "qspec: /dev/full cannot be written: No space left" in capsys.readouterr().err
