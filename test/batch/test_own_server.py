"""`qspec batch` with a real server of its own, which serves the demo models."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmark.prompts import PROMPTS
from sglang_qspec.models import DemoModels
from test.batch.fakes import ROOT, records_of

FLAGS = ["--dtype", "float32", "--max-running-requests", "2", "--context-length", "2048"]
KV = ["--max-total-tokens", "8192", "--log-level", "warning"]


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.usefixtures("models")
def test_without_a_model_the_demo_models_answer_and_a_killed_server_comes_back(
    tmp_path: Path, models: DemoModels
) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chats = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]
    path.write_text("".join(json.dumps({**chat, "temperature": 0}) + "\n" for chat in chats))
    given = ["batch", str(path), "--output", str(output), "--max-tokens", "64", "--", *FLAGS, *KV]
    with subprocess.Popen(
        [sys.executable, "-m", "sglang_qspec", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    ) as process:
        while process.poll() is None and (not output.exists() or not records_of(output)):
            time.sleep(0.2)
        below = psutil.Process(process.pid).children(recursive=True)
        scheduler = next(each for each in below if "scheduler" in "".join(each.cmdline()))
        scheduler.kill()
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert f"without --model the demo models answer: target {models.target}" in out
    assert out.count("starting a server") == 2
    records = records_of(output)
    assert {each["custom_id"] for each in records} == {str(i + 1) for i in range(len(PROMPTS))}
    assert len(records) == len(PROMPTS)
    assert "passes saved" in out
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
