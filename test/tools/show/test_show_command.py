"""The command `qspec show`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.__main__ import main
from test.tools.show.answers import SKY
from test.tools.show.upstream import upstream


@pytest.fixture
def obeys_ctrl_c() -> Iterator[None]:
    """Child processes end with SIGINT, also if a shell without job control ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("obeys_ctrl_c")
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
            try:
                running.send_signal(signal.SIGINT)
                assert running.wait(60) == 0
            finally:
                running.kill()


def test_prompts_that_cannot_be_read_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--prompts", "/absent.txt"]) == 1
    words = "qspec: .*the file of prompts cannot be read.*\n"
    assert re.fullmatch(words, capsys.readouterr().err)
