"""docs/observability.md names what the code shows, all of it and nothing else."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.metrics import DraftMetrics
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.trie import TrieLimits, TrieStore

DOCUMENT = Path(__file__).parents[1] / "docs" / "observability.md"


def test_the_documented_series_are_those_of_the_metrics() -> None:
    registry = CollectorRegistry()
    DraftMetrics({"model_name": "m"}, registry)
    suffixes = {"counter": "_total"}
    made = {family.name + suffixes.get(family.type, "") for family in registry.collect()}
    documented = re.findall(r"^\| `(sglang:qspec_\w+)` ", DOCUMENT.read_text(), re.MULTILINE)
    assert set(documented) == made


def test_the_documented_fields_are_those_of_the_server_info() -> None:
    limits = TrieLimits(vocab_size=10)
    described = Speculator(QSpecConfig(), 10, TrieStore(limits), None).describe()
    _, table = DOCUMENT.read_text().split("| field | meaning |")
    rows = table.split("\n\n")[0].splitlines()[2:]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(documented) == described.keys()
