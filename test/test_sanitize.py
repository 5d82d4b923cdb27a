"""`scripts/sanitize` reports no error in the compiled parts."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_compiled_parts_run_under_sanitizers_without_a_report() -> None:
    run = subprocess.run([ROOT / "scripts" / "sanitize"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    summary = run.stdout.splitlines()[-1]
    found = re.search(r"and (\d+) random operations without a report", summary)
    assert found, summary
    assert int(found[1]) >= 100_000
