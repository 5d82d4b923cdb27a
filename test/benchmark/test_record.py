"""Recorded step drafts are what the drafter sends while the target commits token by token."""

from __future__ import annotations

import pytest

from benchmark import record
from benchmark.replay import LOOKAHEAD
from test.sidecar.scripted import ScriptedModel


def test_a_step_draft_begins_where_the_target_diverges_and_ends_at_the_lookahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "draft_model", lambda *_, **__: ScriptedModel())
    draft = record.step_drafter("model", "cpu")
    agreed = list(range(8, 20))
    diverged = [8, 9, 10, 50, 51, 52]
    first, second = draft([([5, 6, 7], agreed), ([5, 6, 7], diverged)])
    # The first commit is the token that prefill gives.
    assert first == [(1, list(range(9, 20 + LOOKAHEAD)))]
    assert second == [(1, list(range(9, 11 + LOOKAHEAD))), (4, list(range(51, 53 + LOOKAHEAD)))]
