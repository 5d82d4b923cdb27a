"""`qspec plan`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import shown
from sglang_qspec.tools.measure.tables import save
from test.tools.plan.examples import flat


@pytest.fixture
def plan(tmp_path: Path) -> list[str]:
    path = tmp_path / "tables.json"
    save(flat(0.9, most=8), path)
    small = ["--trace", "batch:40", "--output-tokens", "40", "--prompt-tokens", "10"]
    return ["plan", "--gpus", "4", "--tables", str(path), "--pipelines", "ahead", *small]


def test_the_plans_are_printed_beside_those_without_speculation(
    plan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*plan, "--slo", "p95=9"]) == 0
    printed = capsys.readouterr().out
    first = (
        r"A sidecar pays: \d+ tokens/s with p95 latency [\d.]+ s from 3 targets with 1 sidecar, "
    )
    assert re.match(first, printed)
    assert "Times are measured." in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith(("QSPEC", "no spec"))]
    assert rows[0][3:5] == ["ahead", "8"]
    assert rows[1][2:6] == ["4", "0", "none", "8"]
    assert "QSPEC keeps p95 <= 9 s" in printed
    assert "Router:" in printed


def test_the_json_has_the_same_figures(plan: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--trace", "poisson:2:40", "--slo", "mean=5"]
    assert main([*plan, *trace, "--json", "--gpu-hour-price", "3.6"]) == 0
    found = json.loads(capsys.readouterr().out)
    plain = found["plans"]["no speculation"]
    assert plain["tokens_per_s"] == pytest.approx(80)
    assert plain["price_per_million_tokens"] == pytest.approx(4 * 1e3 / 80)
    assert found["fewest_gpus"]["no speculation"]["gpus"] < 4
    drafted = found["plans"]["QSPEC"]
    assert drafted["seconds"]["mean"] < plain["seconds"]["mean"]
    assert found["best"] == "no speculation"
    fewest = found["fewest_gpus"]["QSPEC"]["gpus"]
    assert found["verdict"].startswith("No sidecar: mean <= 5 s on 1 GPU from 1 plain server, and ")
    assert f"mean <= 5 s on {fewest} GPUs from 1 target with 1 sidecar" in found["verdict"]


def test_of_arrivals_the_mean_latency_decides(
    plan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*plan, "--trace", "poisson:2:40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    drafted, plain = (each["seconds"]["mean"] for each in found["plans"].values())
    assert drafted < plain
    assert found["verdict"].startswith(f"A sidecar pays: mean latency {drafted:.2f} s from ")
    assert f", and mean latency {plain:.2f} s from 4 plain servers. One" in found["verdict"]


def test_where_no_sidecar_pays_the_first_line_says_so_with_both_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["plan", "--tables", "H100:8B:0.6B", "--pipelines", "ahead", "--slots", "8"]
    given += ["--trace", "batch:40", "--output-tokens", "40", "--gpus"]
    assert main([*given, "2"]) == 0
    first, _, second, *_ = printed = capsys.readouterr().out.splitlines()
    drafted, plain = (line.split()[-6] for line in printed if line.startswith(("QSPEC", "no spec")))
    assert first == (
        f"No sidecar: {plain} tokens/s from 2 plain servers, and {drafted} tokens/s from 1 target "
        "with 1 sidecar, the best plan with a sidecar."
    )
    assert int(drafted) < int(plain)
    assert second.endswith("computed from data sheets, and the agreement is 0.7, assumed.")
    assert main([*given, "1", "--alpha", "0.5"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("No sidecar: no GPU is left for one beside a target; ")
    assert printed[2].endswith("and the agreement is 0.5.")


def test_more_than_a_plan_can_serve_is_said_in_the_first_line(
    plan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*plan, "--trace", "poisson:1000:40"]) == 0
    assert "more requests than can be served from 4 plain servers" in capsys.readouterr().out


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_a_sweep_is_a_picture(plan: list[str], suffix: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sweep{suffix}"
    assert main([*plan, "--sweep", str(path)]) == 0
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--alpha", "0.5"], "--alpha is for computed tables"),
        (["--tables", "none.json"], "--tables is none.json, which cannot be read"),
        (["--trace", "batch:0"], "--trace is 'batch:0', but must be batch:REQUESTS"),
        (
            ["--trace", f"batch:{'9' * 400}"],
            f"--trace is {shown('batch:' + '9' * 400)}, but must be batch:",
        ),
        (["--slots", "16"], "--slots is 16, but must be at most 8"),
        (["--sweep", "x.pdf"], "--sweep is x.pdf, but must end in .svg or .png"),
    ],
)
def test_input_that_is_not_allowed_is_an_error_of_one_line(
    plan: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*plan, *more]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"qspec: {message}")
    assert error.count("\n") == 1


def test_computed_tables_have_the_context_of_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--gpus", "2", "--tables", "A10:8B:1B", "--alpha", "0.8"]
    given += ["--trace", "batch:1", "--slots", "32"]
    assert main([*given, "--prompt-tokens", "8000"]) == 1
    assert "--slots is 32, but must be at most 4" in capsys.readouterr().err


def test_too_few_gpus_for_a_target_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--tables", "H100:70B:1B", "--alpha", "0.8", "--gpus"]
    assert main(["plan", *given, "3"]) == 1
    assert "--gpus is 3, but must be at least 4" in capsys.readouterr().err
