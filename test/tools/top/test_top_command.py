"""`qspec top` without a terminal, with a server that goes away, and after Ctrl-C."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from sglang_qspec.__main__ import main
from test.strange_server import response, strange
from test.tools.top.recorded import LOADED

FIRST, SECOND = (snapshot.state for snapshot in LOADED)


@contextmanager
def recorded_server(states: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A web server that sends recorded states one after another, then refuses requests."""
    left = list(states)

    def answer(path: str, body: bytes) -> bytes:
        assert path == "/server_info"
        if not left:
            return response(b"", status="503 Service Unavailable")
        return response({"internal_states": [{"qspec": left.pop(0)}]})

    with strange(answer) as server:
        yield server.url


def test_once_prints_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    with recorded_server([FIRST, SECOND]) as url:
        assert main(["top", "--url", url, "--once", "--interval", "0.1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("speculation on") == 1
    assert captured.out.startswith(f"qspec top   {url}\n")
    assert "\x1b" not in captured.out
    assert captured.err == ""


def test_frames_follow_one_another_until_the_server_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with recorded_server([FIRST, SECOND, SECOND]) as url:
        assert main(["top", "--url", url, "--interval", "0.1"]) == 1
    captured = capsys.readouterr()
    rates = re.findall(r"^decoding +(\S+) tokens/s", captured.out, re.MULTILINE)
    assert [float(rate) > 0 for rate in rates] == [True, False]  # each frame has its own interval
    assert captured.err == f"qspec: {url} refused the request (HTTP 503): without a message\n"


def test_the_view_refreshes_on_a_terminal_and_ctrl_c_ends_it() -> None:
    with recorded_server([FIRST, SECOND] * 500) as url:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "sglang_qspec", "top", "--url", url, "--interval", "0.1"]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            # A shell lets its background jobs, such as this test, ignore the signal.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(theirs)
        shown = read(ours, until="speculation")
        for _ in range(3):
            shown += read(ours, until="speculation")
        process.send_signal(signal.SIGINT)
        shown += read(ours)
        assert process.wait(120) == 0
        os.close(ours)
    assert "Traceback" not in shown
    # Each frame but the first begins with moves to the first line of the last frame.
    assert shown.count("\x1b[1A") > 40
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is visible again
    assert re.search("\x1b\\[32mready\x1b", shown)


def read(terminal: int, until: str | None = None) -> str:
    """What the terminal shows, up to a text; by default to the end."""
    shown, deadline = "", time.monotonic() + 120
    while until is None or until not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                return shown
    return shown
