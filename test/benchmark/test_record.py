"""A recording has the completions of each prompt."""

from __future__ import annotations

import argparse

import pytest

from benchmark import record
from test.sidecar.scripted import ScriptedModel


def test_each_prompt_has_its_completions_of_the_given_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "draft_model", lambda *_, **__: ScriptedModel())
    options = argparse.Namespace(device="cpu", max_new_tokens=4, temperature=0.6)
    complete = record.completer("model", 2, options)
    assert complete([[5, 6], [40]]) == [[[7, 8, 9, 10]] * 2, [[41, 42, 43, 44]] * 2]
