"""The report: complete, one file, and clear about missing measurements."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark.harness import charts
from benchmark.queueing.configurations import NAMES
from benchmark.queueing.figures import figures
from benchmark.queueing.report import report_of
from benchmark.queueing.summary import Summary, summarize
from test.benchmark.runs import round_of


@pytest.fixture
def summary() -> Summary:
    served = [name for name in NAMES if name != "ngram"]
    return summarize(round_of(1, served), NAMES, {"ngram": "no <kernel>"})


def test_the_page_has_all_tables_and_figures(summary: Summary) -> None:
    pytest.importorskip("matplotlib")
    facts = {"command": "python -m benchmark.bench_queue", "machine": "a <big> one"}
    drawn = figures(summary)
    text = report_of(summary, drawn, facts).markdown()
    assert len(drawn) == 3
    assert all((figure.svg or "").startswith("<?xml") for figure in drawn)
    assert all(f"({figure.name}.svg)" in text for figure in drawn)
    for expected in ("python -m benchmark.bench_queue", "a <big> one", "no <kernel>"):
        assert expected in text


def test_each_figure_shows_its_own_configurations(
    summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, dict[Any, Any]] = {}

    def keep(kind: str) -> None:
        def draw(data: dict[Any, Any], *_: object, **__: object) -> str:
            shown[f"{kind} {len(shown)}"] = data
            return ""

        monkeypatch.setattr(charts, kind, draw)

    monkeypatch.setattr(charts, "available", lambda: True)
    for kind in ("distributions", "lines"):
        keep(kind)
    figures(summary)
    match_rates, speedups, completions = shown.values()
    for chart in (match_rates, speedups):
        assert {"lookup", "qspec-1", "qspec-8"} <= chart.keys()
        assert "none" not in chart
    assert list(completions[""]["mean"]) == [1, 2, 4, 8]


def test_without_matplotlib_the_page_says_how_to_get_it(
    summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    assert figures(summary) == ()
    assert charts.INSTALL in report_of(summary).markdown()


def test_a_figure_without_data_says_so() -> None:
    pytest.importorskip("matplotlib")
    summary = summarize(round_of(1, ("none",)), ("none",), {})
    drawn = figures(summary)
    assert [figure.svg for figure in drawn] == [None] * 3
    assert (
        report_of(summary, drawn)
        .markdown()
        .count("None of the configurations that this figure shows")
        == 3
    )


def test_a_report_can_be_written_when_nothing_could_be_served() -> None:
    summary = summarize({}, ("none",), {"none": "no memory"})
    assert "no memory" in report_of(summary).markdown()
    assert "none: failed: no memory" in report_of(summary).text()


def test_the_table_has_a_line_for_each_configuration(summary: Summary) -> None:
    overview, *_, failed = report_of(summary).text().split("\n\n")
    served = [name for name in NAMES if name != "ngram"]
    lines = overview.splitlines()[2:]
    assert [line.split()[0] for line in lines[: len(served)]] == served
    assert lines[len(served) - 1].endswith("queue 60%, output 40%")
    assert failed == "ngram: failed: no <kernel>"


def test_the_markdown_has_as_many_cells_in_every_line_of_a_table(summary: Summary) -> None:
    overall, speedups, lengths = (
        text for text in report_of(summary).markdown().split("\n\n") if text.startswith("|")
    )
    for text in (overall, speedups, lengths):
        assert len({line.count("|") for line in text.splitlines()}) == 1
        assert text.splitlines()[-1].startswith("| qspec-8 |")
    assert speedups.splitlines()[0] == "| speedup | qa | rag |"
    assert speedups.splitlines()[-1] == "| qspec-8 | 2.00 (one round) | 2.00 (one round) |"
    assert lengths.splitlines()[-1] == "| qspec-8 | 2.25 | 2.25 |"
