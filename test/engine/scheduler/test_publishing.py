"""A server publishes the state of speculation, also after an error has ended it."""

import pytest
from prometheus_client import CollectorRegistry

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine import speculation
from sglang_qspec.engine.scheduler import publishing
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.engine.telemetry.metrics import PUBLISH_INTERVAL_S, DraftMetrics
from sglang_qspec.trie import TrieLimits, TrieStore
from test.engine.simulation import Clock


def test_speculation_is_on_off_or_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, registry = Clock(), CollectorRegistry()
    active = Speculator(QSpecConfig(), 10, TrieStore(TrieLimits(vocab_size=10)))
    active.series = DraftMetrics({"model_name": "m"}, registry, clock)
    monkeypatch.setattr(speculation, "_latest", active)
    monkeypatch.setattr(speculation, "_failed", False)

    def shown() -> list[str]:
        clock.now += PUBLISH_INTERVAL_S
        publishing.publish(None, None)
        return [
            sample.labels["state"]
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "sglang:qspec_speculation_state" and sample.value
        ]

    assert shown() == ["on"]
    active.change_setting("qspec_enabled", 0)
    assert shown() == ["off"]
    speculation.deactivate()
    assert shown() == ["failed"]
