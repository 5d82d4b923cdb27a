"""The report: complete, one file, and clear about missing measurements."""

from __future__ import annotations

import base64
import re
from html import escape
from html.parser import HTMLParser
from typing import Any

import pytest

from benchmark.harness import charts
from benchmark.queueing.configurations import NAMES
from benchmark.queueing.figures import figures
from benchmark.queueing.report import report_of
from benchmark.queueing.summary import Summary, summarize
from test.benchmark.runs import round_of

EMBEDDED = "data:image/png;base64,"


@pytest.fixture
def summary() -> Summary:
    served = [name for name in NAMES if name != "ngram"]
    return summarize(round_of(1, served), NAMES, {"ngram": "no <kernel>"})


class Tags(HTMLParser):
    """Checks that the tags of a page are closed, and collects the addresses that they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_all_figures_and_refers_to_no_other_file(summary: Summary) -> None:
    pytest.importorskip("matplotlib")
    facts = {"command": "python -m benchmark.bench_queue", "machine": "a <big> one"}
    drawn = figures(summary)
    text = report_of(summary, drawn, facts).page()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert len(drawn) == 4
    images = [base64.b64decode(data.removeprefix(EMBEDDED)) for data in tags.references]
    assert images == [figure.png for figure in drawn]
    assert all(image.startswith(b"\x89PNG") for image in images)
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    for expected in ("python -m benchmark.bench_queue", "a &lt;big&gt; one", "no &lt;kernel&gt;"):
        assert expected in text


def test_each_figure_shows_its_own_configurations(
    summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, dict[Any, Any]] = {}

    def keep(kind: str) -> None:
        def draw(data: dict[Any, Any], *_: object, **__: object) -> bytes:
            shown[f"{kind} {len(shown)}"] = data
            return b""

        monkeypatch.setattr(charts, kind, draw)

    monkeypatch.setattr(charts, "available", lambda: True)
    for kind in ("distributions", "spread_by_number", "bars_by_group"):
        keep(kind)
    figures(summary)
    match_rates, speedups, completions, groups = shown.values()
    for chart in (match_rates, speedups):
        assert {"lookup", "qspec-1", "qspec-8"} <= chart.keys()
        assert "none" not in chart
    assert list(completions) == [1, 2, 4, 8]
    assert groups.keys() == {"lookup", "qspec-8"}
    assert all(list(values) == ["qa", "rag"] for values in groups.values())


def test_without_matplotlib_the_page_says_how_to_get_it(
    summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "available", lambda: False)
    assert figures(summary) == ()
    assert escape(charts.INSTALL) in report_of(summary).page()


def test_a_figure_without_data_says_so() -> None:
    pytest.importorskip("matplotlib")
    summary = summarize(round_of(1, ("none",)), ("none",), {})
    drawn = figures(summary)
    assert [figure.png for figure in drawn] == [None] * 4
    assert (
        report_of(summary, drawn).page().count("None of the configurations that this figure shows")
        == 4
    )


def test_a_report_can_be_written_when_nothing_could_be_served() -> None:
    summary = summarize({}, ("none",), {"none": "no memory"})
    assert "no memory" in report_of(summary).page()
    assert "none: failed: no memory" in report_of(summary).text()


def test_the_table_has_a_line_for_each_configuration(summary: Summary) -> None:
    overview, *_, failed = report_of(summary).text().split("\n\n")
    served = [name for name in NAMES if name != "ngram"]
    lines = overview.splitlines()[2:]
    assert [line.split()[0] for line in lines[: len(served)]] == served
    assert lines[len(served) - 1].endswith("queue 60%, output 40%")
    assert failed == "ngram: failed: no <kernel>"


def test_every_line_of_a_markdown_table_has_the_same_number_of_cells(summary: Summary) -> None:
    overall, speedups, lengths = report_of(summary).markdown().strip().split("\n\n")
    for text in (overall, speedups, lengths):
        assert len({line.count("|") for line in text.splitlines()}) == 1
        assert text.splitlines()[-1].startswith("| qspec-8 |")
    assert speedups.splitlines()[0] == "| speedup | qa | rag |"
    assert speedups.splitlines()[-1] == "| qspec-8 | 2.00 (one round) | 2.00 (one round) |"
    assert lengths.splitlines()[-1] == "| qspec-8 | 2.25 | 2.25 |"
