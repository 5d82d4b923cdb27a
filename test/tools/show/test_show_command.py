"""The command `qspec show`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sglang_qspec.__main__ import main
from test.tools.show.answers import SKY
from test.tools.show.upstream import upstream


def test_it_prints_its_address_serves_the_page_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("One?\n")
    with upstream(SKY) as server:
        arguments = ["show", "--url", server.url, "--prompts", str(tmp_path / "prompts.txt")]
        command = [sys.executable, "-m", "sglang_qspec", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            line = running.stdout.readline()
            found = re.fullmatch(rf"page: (\S+)   server: {server.url}   Ctrl-C ends\n", line)
            assert found is not None
            with urllib.request.urlopen(found[1], timeout=60) as answer:
                assert "<title>qspec show</title>" in answer.read().decode()
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "no server answers at"),
        (["--prompts", "/absent.txt"], "the file of prompts cannot be read"),
    ],
)
def test_an_error_is_one_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments]) == 1
    assert re.fullmatch(rf"qspec: .*{words}.*\n", capsys.readouterr().err)


def test_a_wrong_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--port", "70000"])
    assert "--port" in capsys.readouterr().err
