"""`qspec top` with a running server."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmark.harness.server import Server
from sglang_qspec.__main__ import main
from test.engine.server.running import all_at_once, state, until

pytestmark = pytest.mark.server


def test_it_shows_what_the_server_does(
    server: Server, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(all_at_once, server, prompts)
        until(lambda: state(server)["live_requests"] > 2)
        assert main(["top", "--url", server.url, "--once", "--interval", "0.5"]) == 0
        answers.result()
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0].rstrip() == f"qspec top   {server.url}"
    assert re.fullmatch(r"speculation on   pipeline \w+ \(mode auto\)   sidecar ready *", lines[1])
    assert re.match(r"requests +[12] running   [1-9]", lines[2])
    assert re.match(r"decoding +[1-9]\d*\.\d tokens/s   accept length [1-9]\.", lines[3])
    assert max(map(len, lines)) <= 80
