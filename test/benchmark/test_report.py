"""The report: complete, one file, and right about what it could not measure."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from benchmark.queueing import charts
from benchmark.queueing.configurations import NAMES
from benchmark.queueing.figures import figures
from benchmark.queueing.report import page, table
from benchmark.queueing.summary import Summary, summarize
from test.benchmark.runs import configurations


@pytest.fixture
def summary() -> Summary:
    served = configurations([name for name in NAMES if name != "ngram"])
    return summarize([served], NAMES, {"ngram": "no <kernel>"})


class Tags(HTMLParser):
    """The tags of a page, whether they are closed, and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_has_all_figures_and_needs_nothing_else(summary: Summary) -> None:
    text = page(summary, {"command": "python -m benchmark.bench_queue", "machine": "a <big> one"})
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not tags.references
    assert tags.seen.count("svg") == 4
    assert not re.search(r"https?:|url\(|@import|<script|<link", text)
    for figure in figures(summary):
        assert figure.title in text
    for expected in ("python -m benchmark.bench_queue", "a &lt;big&gt; one", "no &lt;kernel&gt;"):
        assert expected in text


def test_every_axis_has_a_label_with_its_unit(summary: Summary) -> None:
    match_rates, speedups, completions, groups = [figure.svg or "" for figure in figures(summary)]
    assert "accepted / proposed draft tokens" in match_rates
    assert "× no speculation" in speedups
    assert "completions n" in completions
    assert "mean speedup of requests (×)" in completions
    assert "speedup (× tokens/s)" in groups
    assert "group of prompts" in groups


def test_figures_show_the_configurations_they_are_about(summary: Summary) -> None:
    match_rates, speedups, completions, groups = [figure.svg or "" for figure in figures(summary)]
    for chart in (match_rates, speedups):
        assert all(f">{name}<" in chart for name in ("lookup", "qspec-1", "qspec-8"))
        assert ">none<" not in chart
    assert completions.count("<circle") == 4
    assert all(f">{name}<" in groups for name in ("lookup", "qspec-8", "qa", "rag"))
    assert ">qspec-4<" not in groups


def test_a_figure_without_data_is_said_to_have_none() -> None:
    summary = summarize([configurations(("none",))], ("none",), {})
    assert [figure.svg for figure in figures(summary)] == [None] * 4
    assert page(summary, {}).count("None of the configurations that this figure shows") == 4


def test_a_report_can_be_written_when_nothing_could_be_served() -> None:
    summary = summarize([{}], ("none",), {"none": "no memory"})
    assert "no memory" in page(summary, {})
    assert "none: failed: no memory" in table(summary)


def test_the_table_has_a_line_for_each_configuration(summary: Summary) -> None:
    lines = table(summary).splitlines()
    served = [name for name in NAMES if name != "ngram"]
    assert [line.split()[0] for line in lines[1 : len(served) + 1]] == served
    assert "qspec-8: accepted draft tokens by source: queue 60%, output 40%" in lines
    assert lines[-1] == "ngram: failed: no <kernel>"


@pytest.mark.parametrize(
    ("wanted", "step"), [(0.03, 0.05), (0.2, 0.2), (1.0, 1.0), (1.1, 2.0), (6.0, 10.0)]
)
def test_ticks_are_at_round_steps(wanted: float, step: float) -> None:
    assert charts.round_step(wanted) == pytest.approx(step)


def test_the_scale_is_linear_and_has_ticks_within() -> None:
    scale = charts.Scale(0.0, 2.1, 100.0, 310.0)
    assert scale(0.5) == pytest.approx(150.0)
    assert scale.ticks == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
