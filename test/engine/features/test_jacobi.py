"""Guesses that the target improves change no answer, alone and beside the other drafts."""

from __future__ import annotations

from typing import Any

import pytest

from test.engine.features.asking import ask, both, check_same
from test.preloaded.server import Server

pytestmark = pytest.mark.server
JACOBI = {"qspec_sources": ["jacobi"]}


def test_the_target_accepts_its_own_guesses_and_the_answer_stays(server: Server) -> None:
    text = "Count: one two three four one two three four one two three four one two"
    plain, _ = both(server, {"max_new_tokens": 48}, text=text)
    ours = ask(server, {"max_new_tokens": 48, "custom_params": JACOBI}, text=text)
    check_same(plain, ours)
    by_source: dict[str, int] = ours["meta_info"]["qspec"]["accepted_by_source"]
    assert by_source["jacobi"] == ours["meta_info"]["qspec"]["accepted_tokens"]


def test_sampled_answers_with_a_seed_stay(server: Server) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 32, "sampling_seed": 11}
    plain: dict[str, Any] = ask(server, {**sampling, "custom_params": {"qspec_enabled": False}})
    ours = ask(server, {**sampling, "custom_params": JACOBI})
    assert ours["output_ids"] == plain["output_ids"]
    assert ours["meta_info"]["qspec"]["proposed_tokens"] > 0
