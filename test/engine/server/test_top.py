"""`qspec top` with a running server."""

import re
from typing import Any

import pytest

from benchmark.harness.server import Server
from sglang_qspec.__main__ import main
from test.engine.load import loaded
from test.engine.server.running import until

pytestmark = pytest.mark.server


def test_it_shows_what_the_server_does(
    server: Server,
    bodies: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []

    def shows_the_load() -> bool:
        """Whether it shows running and waiting requests, and a pass that ended meanwhile."""
        assert main(["top", "--url", server.url, "--once", "--interval", "0.5"]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        lines[:] = shown.out.splitlines()
        requests = re.match(r"requests +[12] running   [1-9]", lines[2])
        rate = re.match(r"decoding +[1-9]\d*\.\d tokens/s   accept length [1-9]\.", lines[3])
        return bool(requests and rate)

    with loaded(server, bodies, expected):
        until(shows_the_load)
    assert lines[0].rstrip() == f"qspec top   {server.url}"
    assert re.fullmatch(r"speculation on   pipeline \w+ \(mode auto\)   sidecar ready *", lines[1])
    assert max(map(len, lines)) <= 80
