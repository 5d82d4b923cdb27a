"""The figures in docs/theory.md match the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.__main__ import main
from test.tools.theory.bounds import sd_over_psd

PAGE = Path(__file__).parents[3] / "docs" / "theory.md"


def table(heading: str) -> Iterator[list[str]]:
    """The rows of a table, including its heading, without the separator line."""
    lines = PAGE.read_text().splitlines()
    for line in lines[lines.index(next(line for line in lines if line.startswith(heading))) :]:
        if not line.startswith("|"):
            return
        cells = [cell.strip().strip("`*") for cell in line.strip("|").split("|")]
        if not cells[0].startswith("--") or cells[0] == "--alpha":
            yield cells


def test_the_documented_throughputs_match_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, *rows = table("| `--alpha` |")
    assert len(rows) == 8
    for row in rows:
        given = [text for pair in zip(options[:3], row[:3], strict=True) for text in pair]
        assert main(["theory", "--k", "4", "--in-flight", "16", *given]) == 0
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        rates = {line[0]: float(line[3]) for line in printed[1:]}
        for pipeline, cell in zip(options[3:], row[3:], strict=True):
            assert float(cell) == pytest.approx(rates[pipeline], abs=0.6)


def test_the_documented_ratios_of_theorem_1_match_the_function() -> None:
    places, ratios = table("| αV |")
    for place, ratio in zip(places[1:], ratios[1:], strict=True):
        assert float(ratio) == pytest.approx(sd_over_psd(float(place)), abs=0.006)
