"""docs/observability.md lists exactly the metrics, fields and settings of the code."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sglang.srt.runtime_context import get_parallel

from sglang_qspec.config import QSpecConfig
from sglang_qspec.draft_source import SOURCES
from sglang_qspec.engine import speculation
from sglang_qspec.engine.scheduler import internal_state
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.engine.telemetry.metrics import DraftMetrics
from sglang_qspec.policy import runtime_settings
from sglang_qspec.sidecar.figures import FIGURES
from sglang_qspec.sidecar.metrics import PREFIX
from sglang_qspec.trie import TrieLimits, TrieStore

DOCUMENT = Path(__file__).parents[1] / "docs" / "observability.md"


def test_the_documented_series_match_the_metrics() -> None:
    registry = CollectorRegistry()
    DraftMetrics({"model_name": "m"}, registry)
    suffixes = {"counter": "_total"}
    made = {family.name + suffixes.get(family.type, "") for family in registry.collect()}
    documented = re.findall(r"^\| `(sglang:qspec_\w+)` ", DOCUMENT.read_text(), re.MULTILINE)
    assert set(documented) == made


def test_the_documented_series_of_the_sidecar_match_its_metrics() -> None:
    suffixes = {True: "_total", False: ""}
    made = {PREFIX + (each.series or each.name) + suffixes[each.is_total] for each in FIGURES}
    documented = re.findall(rf"^\| `({PREFIX}\w+)` ", DOCUMENT.read_text(), re.MULTILINE)
    assert set(documented) == made
    assert len(documented) == len(made) == len(FIGURES)


def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The QSPEC part of a server's internal state."""
    active = Speculator(QSpecConfig(), 10, TrieStore(TrieLimits(vocab_size=10)))
    monkeypatch.setattr(speculation, "_latest", active)
    state: dict[str, Any] = {}
    with get_parallel().override(dp_rank=None):
        internal_state.describe(None, None, state)
    ours: dict[str, Any] = state["qspec"]
    return ours


def first_column(heading: str) -> set[str]:
    """The names in the first column of the table with this heading."""
    _, table = DOCUMENT.read_text().split(heading)
    rows = table.split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_documented_fields_match_the_server_info(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = first_column("| field | meaning |")
    assert fields == shown(monkeypatch).keys() - {"settings"}


def test_the_documented_draft_sources_match_the_code() -> None:
    page = DOCUMENT.with_name("request-options.md").read_text()
    table = page.split("## Draft sources\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(SOURCES)


def test_the_documented_settings_match_the_runtime_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = first_column("| setting | in `server_args` | allowed |") - {"source_NAME"}
    assert {"source_queue"} <= listed  # as an example
    settings = listed | {f"source_{source}" for source in SOURCES}
    assert settings == shown(monkeypatch)["settings"].keys()
    assert {"qspec_" + name for name in settings} == set(runtime_settings.NAMES)
