"""The command that makes the table of docs/models.md says what a family's server did."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from test.engine.families import matrix
from test.engine.families.drafting import Drafts
from test.engine.families.parity import Comparison

ROOT = Path(__file__).parents[3]
SERVED = ("Qwen 3 MoE", "Qwen 2 MoE", "Qwen 3 VL")
REFUSED = "Qwen 3 Next"
PLAIN = [[1, 2, 3, 4, 5, 6]]
OTHER = [[1, 2, 3, 4, 5, 7]]


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_families_of_different_kinds_are_equal_and_one_is_refused() -> None:
    command = [sys.executable, "-m", "test.engine.families.matrix", *SERVED, REFUSED]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = ended.stdout.splitlines()[2:]
    for name, row in zip(SERVED, rows, strict=False):
        equal = r"equal \([1-9]\d*\)"
        cells = rf"yes \| {equal} \| {equal} \| equal"
        assert re.fullmatch(rf"\| {name} \| `\w+` \| {cells} \| \|", row)
    assert re.fullmatch(
        rf"\| {REFUSED} \| `\w+` \| no \| \| \| \| .* a model with recurrent layers .*\|", rows[-1]
    )


@pytest.mark.parametrize(
    ("outputs", "accepted", "branching", "lookups", "guesses"),
    [
        ((PLAIN, PLAIN), 2, True, "equal (4)", "equal (4)"),
        ((PLAIN, OTHER), 2, True, "**differs**", "**differs**"),
        ((OTHER, PLAIN), 0, False, "**differs**", "**differs**"),
        ((PLAIN, PLAIN), 0, True, "none accepted", "none accepted"),
        ((PLAIN, PLAIN), 2, False, "equal (4)", "no branches"),
        ((), 0, False, "", ""),
    ],
)
def test_a_cell_is_equal_if_all_outputs_are_and_drafts_were_accepted(
    outputs: tuple[list[list[int]]], accepted: int, branching: bool, lookups: str, guesses: str
) -> None:
    found = Comparison(PLAIN, branching=branching)
    for kind in ("lookups", "guesses"):
        for passes, output in zip(("ragged", "one width"), outputs, strict=False):
            found.drafted[f"{passes}, {kind}"] = output
            found.accepted[f"{passes}, {kind}"] = accepted
    assert (matrix.cell(found, "lookups"), matrix.cell(found, "guesses")) == (lookups, guesses)


SAME = Drafts(PLAIN, PLAIN)


@pytest.mark.parametrize(
    ("found", "drafts", "row"),
    [
        (Comparison(refused="no. Never"), Drafts(), "| X | `C` | no | | | | no |"),
        (Comparison(failed="E: a|b.c."), Drafts(), r"| X | `C` | no | | | | E: a\|b.c |"),
        (Comparison(PLAIN, failed="E"), SAME, "| X | `C` | yes | | | equal | E |"),
        (Comparison([[1, 1]]), Drafts(failed="e"), "| X | `C` | repeats a token | | | no | e |"),
        (Comparison(PLAIN), Drafts(PLAIN, OTHER), "| X | `C` | yes | | | **differs** | |"),
        (Comparison(PLAIN), Drafts(OTHER, PLAIN), "| X | `C` | yes | | | **differs** | |"),
        (Comparison(PLAIN), Drafts(), "| X | `C` | yes | | | **differs** | |"),
    ],
)
def test_a_row_says_what_the_draft_model_did_and_why_a_family_is_not_served(
    found: Comparison, drafts: Drafts, row: str
) -> None:
    assert matrix.row("X", "C", found, drafts) == row
