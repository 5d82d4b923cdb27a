"""Fake servers of the tests: in a thread, in a process, and in place of SGLang's."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from sglang_qspec import config
from sglang_qspec.tools.ports import free_port
from test.tools.batch.fake_server import FakeServer, text_of

ROOT = Path(__file__).parents[3]


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """The URL of a fake server that a thread of this process runs."""
    port = free_port()
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", port).start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        wait_for(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


class FakeProcess:
    """A fake server in a process of its own, which can be killed and started again."""

    def __init__(self, *arguments: str) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "test.tools.batch.fake_server", "--port", str(self._port)]
        self._process = subprocess.Popen([*command, *self._arguments], cwd=ROOT)
        wait_for(self.url)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def environment_with_fake_sglang(folder: Path) -> dict[str, str]:
    """An environment in which `sglang.launch_server` is a fake server; `fails` ends its start."""
    package = folder / "modules" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import sys\n"
        "print('arguments', sys.argv[1:], flush=True)\n"
        "if 'fails' in sys.argv: sys.exit('the model is missing')\n"
        "sys.argv[1:] = [*sys.argv[sys.argv.index('--port'):][:2], '--delay', '0.02']\n"
        "from test.tools.batch.fake_server import main\n"
        "main()\n"
    )
    modules = f"{package.parent}:{ROOT}:{ROOT / 'python'}"
    return {**config.environment_with_gpus(None), "PYTHONPATH": modules}


def wait_for(url: str) -> None:
    """Wait until a server answers at the URL."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url + "/health", timeout=5):
            return
        time.sleep(0.02)
    raise AssertionError(f"no fake server answers at {url}")


def write_lines(path: Path, prompts: Sequence[str]) -> Path:
    """Write an input with these prompts; their custom_ids are the prompts too."""
    records = [json.dumps({"custom_id": prompt, "prompt": prompt}) for prompt in prompts]
    path.write_text("".join(record + "\n" for record in records))
    return path


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of an output; an absent file has none."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def assert_complete(output: Path, prompts: Sequence[str]) -> None:
    """Check that each prompt has exactly one answer, and the right one."""
    records = records_of(output)
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in records}
    assert len(records) == len(texts) == len(prompts)
    assert texts == {prompt: text_of(prompt) for prompt in prompts}
