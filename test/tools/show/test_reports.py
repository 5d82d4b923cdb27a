"""The charts of `bench_queue`'s report, in a real browser as wide as a phone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmark.queueing.charts import charts
from benchmark.queueing.configurations import NAMES
from benchmark.queueing.report import report_of
from benchmark.queueing.summary import Blocks
from test.benchmark.runs import round_of
from test.tools.show.browser import Page


def test_the_report_of_the_queue_is_readable_on_a_phone(page: Page, tmp_path: Path) -> None:
    served = [name for name in NAMES if name != "ngram"]
    blocks = Blocks(round_of(1, served), served)
    report = report_of(blocks, charts(blocks))
    report = replace(report, facts={"machine": "<big>"}, failed={"ngram": "no <kernel>"})
    file = tmp_path / "report.html"
    file.write_text(report.html())
    page.open(file.as_uri(), width=400)
    charts_drawn = page.all(".chart")
    assert len(charts_drawn) == 4
    # As wide as the phone allows, so a unit of the drawing is about a pixel.
    assert all(chart.rect["width"] >= 340 for chart in charts_drawn)
    assert page.script("return document.documentElement.scrollWidth") <= 400
    sizes = page.script(
        "return [...document.querySelectorAll('.chart text')].map((text) => "
        "text.getBoundingClientRect()).map((box) => [box.left, box.right, box.height])"
    )
    assert all(left >= 0 and right <= 400 and height >= 9 for left, right, height in sizes)
    assert len(page.all(".chart .box")) == 2 * 7  # Each with drafts, in two charts.
    assert page.text(".error") == "ngram: failed: no <kernel>"
    assert page.text("tbody tr:last-child th") == "qspec-8"
    assert page.complaints() == []


def test_a_chart_without_data_says_so(page: Page, tmp_path: Path) -> None:
    blocks = Blocks(round_of(1, ("none",)), ("none",))
    file = tmp_path / "report.html"
    file.write_text(report_of(blocks, charts(blocks)).html())
    page.open(file.as_uri())
    texts = [figure.text for figure in page.all("figure")]
    assert len(texts) == 4
    assert all("None of the configurations that this chart shows" in text for text in texts)
