"""`qspec measure` against the running server of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.harness.server import Server
from sglang_qspec.__main__ import main
from sglang_qspec.tools.measure import pass_timer, server_tables
from sglang_qspec.tools.measure.tables import load
from test.engine.server.running import state

pytestmark = pytest.mark.server


def test_the_tables_of_a_running_server_make_a_plan(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Repetitions make the times more accurate, and take most of the time.
    monkeypatch.setattr(pass_timer, "REPEATS", 1)
    monkeypatch.setattr(server_tables, "STEP_REPEATS", 1)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "tables.json"
    texts = ("Name three rivers.", "Explain rain.", "Count to ten.", "Write a poem.")
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    before = state(server)["settings"]
    given = ["--url", server.url, "--prompts", str(prompts), "--output", str(output)]
    assert main(["measure", *given, "--requests", "1", "2", "--tokens", "24"]) == 0
    assert state(server)["settings"] == before
    found = load(output)
    assert (found.source, found.on_gpu) == ("measured", False)
    assert {(row.requests, row.width) for row in found.verify} >= {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert min(found.passes(2, found.passes.widest), found.passes(1, 1)) > 0
    assert found.prefill.token > 0
    alone, together = (row.rows for row in found.draft_steps)
    assert 1 <= alone < together <= 2  # some steps lack a request that has ended
    step = "".join(found.agreement["step"])  # type: ignore[arg-type]
    assert 0.5 < step.count("1") / len(step) <= 1
    capsys.readouterr()
    plan = ["plan", "--gpus", "2", "--tables", str(output), "--trace", "batch:6", "--json"]
    assert main(plan) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans["QSPEC"]["tokens_per_s"] > 0


def test_a_server_that_does_not_answer_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--url", "http://127.0.0.1:1", "--output", str(tmp_path / "tables.json")]
    assert main(["measure", *given]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
