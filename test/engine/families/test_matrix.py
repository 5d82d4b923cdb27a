"""The command that makes the table of docs/models.md serves families of different kinds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EQUAL = ("Qwen 3 MoE", "Qwen 2 MoE", "Qwen 3 VL")
REFUSED = "Qwen 3 Next"

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(1200)]


def test_the_table_has_families_that_are_equal_and_one_that_is_refused() -> None:
    command = [sys.executable, "-m", "test.engine.families.matrix", *EQUAL, REFUSED]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = [row.strip("| ").split(" | ") for row in ended.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == [*EQUAL, REFUSED]
    for _, _, plain, lookups, guesses, *_ in rows[:-1]:
        assert plain == "yes"
        assert re.fullmatch(r"equal \(\d+\)", lookups)
        assert re.fullmatch(r"equal \(\d+\)", guesses)
    assert "a model with recurrent layers" in rows[-1][-1]
