"""`qspec theory`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import asdict

from sglang_qspec.__main__ import main
from test.tools.theory.test_fit import made

TABLE = """\
predicted   tokens/pass  round ms  tokens/s  x none  x sequential
none               1.00      40.0     200.0    1.00          0.25
sequential         4.71      48.0     784.8    3.92          1.00
halves             4.71      80.0     470.9    2.35          0.60
ahead              4.51      42.2     856.1    4.28          1.09
queue              4.25      40.0     850.0    4.25          1.08
"""
GIVEN = ["--alpha", "0.97", "--k", "4", "--verify-ms", "40", "--draft-ms", "8", "--in-flight", "8"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [asdict(row) for row in made()]}))
    return path


def test_the_pipelines_are_printed_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", *GIVEN]) == 0
    assert capsys.readouterr().out == TABLE


def test_times_can_depend_on_the_requests_and_on_the_width(
    capsys: pytest.CaptureFixture[str],
) -> None:
    curves = ["--verify-ms", "1:30,8:45,16:80", "--plain-ms", "25", "--draft-ms", "1:4,8:8"]
    assert main(["theory", *GIVEN, *curves]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    rounds = {row[0]: row[2] for row in rows[1:]}
    assert rounds["none"] == "25.0"
    assert rounds["sequential"] == "53.0"
    assert rounds["halves"] == f"{2 * (30 + 15 * 3 / 7):.1f}"  # four pipelines each


def test_a_measured_run_is_compared_with_its_fit(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["theory", "--fit", str(results)]) == 0
    printed = capsys.readouterr().out
    assert "alpha: 0.950 (k=3), 0.920 (k=7)" in printed
    assert "draft step: 2.00 ms + 0.30 ms per request" in printed
    assert "overhead of a round: 4.0 ms (b=1), 4.0 ms (b=2)" in printed
    assert "Error of 16 predicted rows: median 0.0 %, worst 0.0 %." in printed
    assert "halves: median 0.0 %, worst 0.0 %; 8 of 8 within 15 %." in printed


def test_a_plot_is_a_png(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "theory.png"
    assert main(["theory", "--fit", str(results), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (GIVEN[:4], "--verify-ms, --draft-ms, --in-flight must be given, unless --fit is given"),
        ([*GIVEN, "--lookahead", "3"], "--lookahead is 3, but must be at least --k, 4"),
        ([*GIVEN, "--plot", "x.png"], "--plot is x.png, but is allowed with --fit only"),
        (
            ["--fit", "nowhere.json", *GIVEN[:4], "--again", "0.5"],
            "--alpha, --k, --again cannot be given with --fit, which takes its figures from the ",
        ),
        (
            ["--fit", "nowhere.json", *GIVEN[4:], "--plain-ms", "25", "--lookahead", "9"],
            "--verify-ms, --draft-ms, --in-flight, --plain-ms, --lookahead cannot be given with",
        ),
        (["--fit", "nowhere.json"], "nowhere.json cannot be read: "),
    ],
)
def test_options_that_do_not_fit_together_are_an_error_of_one_line(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["theory", *wrong]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"qspec: {message}")
    assert error.count("\n") == 1
