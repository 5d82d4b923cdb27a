"""An input of a million lines needs no more memory than its look-ahead and its digests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test.tools.batch.fakes import ROOT

LINES = 1_000_000
LIMIT_MIB = 300
CLIENT = """
import asyncio, resource, sys
from sglang_qspec.__main__ import main
from sglang_qspec.tools.batch import http_server
from sglang_qspec.tools.batch.server import Reply, ReplyKind

class Instant:
    depth = 112
    def __init__(self, url, **limits): self.name = url
    async def open(self): pass
    async def close(self): pass
    async def ask(self, line, guesses, note):
        await asyncio.sleep(0)
        return Reply(ReplyKind.ANSWERED, 200, b'{"choices":[{"text":"x"}]}', tokens=4)

http_server.HttpServer = Instant
status = main(["batch", *sys.argv[1:], "--url", "http://x", "--resume"])
print("status", status, "MiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.thorough
def test_a_million_lines_take_under_300_mb_also_with_resume(tmp_path: Path) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with path.open("w") as file:
        for number in range(LINES):
            file.write(f'{{"custom_id": "request-{number}", "prompt": "{"x" * 60} {number}"}}\n')
    for answered in (0, LINES // 2):
        if answered:
            with output.open("r+b") as written:
                size = sum(len(written.readline()) for _ in range(answered))
                written.truncate(size)
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(path), "--output", str(output)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        words = done.stdout.splitlines()[-1].split()
        assert words[:2] == ["status", "0"], done.stderr
        assert int(words[-1]) < LIMIT_MIB
        with output.open("rb") as answers:
            assert len({line.split(b'"custom_id":')[1][:20] for line in answers}) == LINES
