"""`qspec batch --ray` on two nodes of one CPU each, with real servers of the demo models."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmark.harness.speculation import SIDECAR_MODULE
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.tools.batch.cluster.nodes import Nodes, two_nodes, until
from test.tools.batch.fakes import records_of
from test.tools.batch.test_killed import start
from test.tools.batch.test_own_server import FLAGS, KV

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(1500)]

TOKENS = 48


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    environment |= awaiting(tmp_path_factory.mktemp("plugin"))
    with two_nodes(environment) as nodes:
        yield nodes


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    chats = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]
    path.write_text("".join(json.dumps({**chat, "temperature": 0}) + "\n" for chat in chats))
    return path


def texts_of(output: Path) -> dict[str, str]:
    """The answers by custom_id, each of which has one record."""
    records: list[dict[str, Any]] = records_of(output)
    texts = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in records
    }
    assert len(texts) == len(records) == len(PROMPTS)
    return texts


def schedulers(nodes: Nodes) -> list[psutil.Process]:
    return nodes.processes("sglang::scheduler")


def test_a_killed_server_of_two_changes_and_loses_no_answer(
    tmp_path: Path, nodes: Nodes, models: DemoModels, lines: Path
) -> None:
    pair = ("--model", models.target, "--draft-model", models.draft)
    # Few lines are at a server, so that others wait and the second server is started.
    small = ("--max-tokens", TOKENS, "--server-cpus", 1, "--min-servers", 2, "--in-flight", 2)
    given = ("--ray", nodes.address, *pair, *small, "--", *FLAGS, *KV)
    first = tmp_path / "first.jsonl"
    process = start(lines, "--output", first, *given)
    until(lambda: len(records_of(first)) >= 3, process)
    assert len(schedulers(nodes)) == 2
    schedulers(nodes)[0].kill()
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert "its lines are asked again" in out
    assert not schedulers(nodes)

    second = tmp_path / "second.jsonl"
    alone = ("--model", models.target, "--max-tokens", TOKENS, "--", *FLAGS, *KV)
    out, _ = (process := start(lines, "--output", second, *alone)).communicate(timeout=600)
    assert process.returncode == 0, out
    assert texts_of(first) == texts_of(second)


def test_a_sidecar_on_another_node_drafts_for_the_server(
    tmp_path: Path, nodes: Nodes, models: DemoModels, lines: Path
) -> None:
    pair = ("--model", models.target, "--draft-model", models.draft)
    given = ("--ray", nodes.address, *pair, "--max-tokens", TOKENS, "--server-cpus", 1)
    # No lookups in the prompt or in the output, so every saved pass is a draft of the sidecar. Each
    # node has one CPU, so server and sidecar are on different ones.
    requests = [json.loads(text) for text in lines.read_text().splitlines()]
    only = {"custom_params": {"qspec_sources": ["queue", "step"]}}
    lines.write_text("".join(json.dumps({**each, **only}) + "\n" for each in requests))
    output = tmp_path / "out.jsonl"
    process = start(lines, "--output", output, *given, "--sidecars", 1, "--", *FLAGS, *KV)
    most = 0
    while process.poll() is None:
        most = max(most, len(nodes.processes(SIDECAR_MODULE)))
        time.sleep(0.2)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert most == 1
    assert "sidecars at tcp://" in out
    saved = re.search(r"(\d+) of \d+ passes saved", out.splitlines()[-1])
    assert saved is not None
    assert int(saved[1]) > 0
    texts_of(output)
    assert not nodes.processes(SIDECAR_MODULE)
