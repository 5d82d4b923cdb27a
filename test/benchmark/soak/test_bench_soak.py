"""A soak of less than a minute, from its command to its line of JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_a_short_soak_finds_no_fault_and_reports_every_figure(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    command = [sys.executable, "-m", "benchmark.bench_soak", "--minutes", "0.8"]
    command += ["--templates", "9", "--in-flight", "4", "8", "--output", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["failed"] == record["changed"] == 0
    assert record["leaked"] == {}
    assert record["requests"] > 10
    assert record["compared"] > 2
    assert record["samples"] > 20
    assert record["server_slopes_mib_per_h"]["rss"] is None or record["rss_slope_mib_per_h"]
    assert record == json.loads((folder / "results.json").read_text())
    assert (folder / "memory.svg").read_text().startswith("<?xml")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "request" for event in events) == record["requests"]
    assert len((folder / "samples.csv").read_text().splitlines()) == record["samples"] + 1
    again = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert again.returncode != 0
    assert "there is a soak in" in again.stderr
