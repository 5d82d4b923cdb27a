"""The report: complete, one file, and clear about missing measurements."""

from __future__ import annotations

import pytest

from benchmark.queueing.charts import AGAINST, charts
from benchmark.queueing.configurations import NAMES
from benchmark.queueing.report import report_of
from benchmark.queueing.summary import Summary, summarize
from test.benchmark.runs import round_of


@pytest.fixture
def summary() -> Summary:
    served = [name for name in NAMES if name != "ngram"]
    return summarize(round_of(1, served), NAMES, {"ngram": "no <kernel>"})


def test_the_page_has_all_tables_and_charts(summary: Summary) -> None:
    facts = {"command": "python -m benchmark.bench_queue", "machine": "a <big> one"}
    drawn = charts(summary)
    report = report_of(summary, drawn, facts)
    assert len(drawn) == 4
    assert all(chart.options for chart in drawn)
    assert "(report.html)" in report.markdown()
    for expected in ("python -m benchmark.bench_queue", "a <big> one", "no <kernel>"):
        assert expected in report.markdown()
        assert expected.replace("<", r"\u003c") in report.html()
    for chart in drawn:
        assert chart.title in report.html()


def test_each_chart_shows_its_own_configurations(summary: Summary) -> None:
    match_rates, speedups, completions, against = (dict(c.options or {}) for c in charts(summary))
    for chart in (match_rates, speedups):
        names = [row["name"] for row in chart["rows"]]
        assert {"lookup", "qspec-1", "qspec-8"} <= set(names)
        assert "none" not in names
    assert completions["ticks"] == [1, 2, 4, 8]
    assert completions["series"][0]["points"] == [(n, 2.0) for n in (1, 2, 4, 8)]
    # SGLang's NGRAM failed.
    assert against["names"] == [AGAINST["qspec-8"], AGAINST["lookup"]]
    assert against["rows"] == [
        {"name": name, "values": [2.0, 2.0]} for name in ("all prompts", "qa", "rag")
    ]


def test_a_chart_without_data_has_no_options() -> None:
    summary = summarize(round_of(1, ("none",)), ("none",), {})
    assert [chart.options for chart in charts(summary)] == [None] * 4


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
