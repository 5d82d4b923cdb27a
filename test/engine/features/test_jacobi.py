"""Guesses that the target improves change no answer, alone and beside the other drafts."""

from __future__ import annotations

from typing import Any

import pytest

from test.engine.features.asking import PLAIN, ask, check_same
from test.preloaded.server import Server

pytestmark = pytest.mark.server
JACOBI = {"qspec_sources": ["jacobi"]}


def test_the_target_accepts_its_own_guesses_and_the_answer_stays(server: Server) -> None:
    sampling = {"max_new_tokens": 48, "ignore_eos": True}
    for more in ({}, {"logit_bias": {"500": 100.0}}):
        plain = ask(server, {**sampling, **more, "custom_params": PLAIN})
        ours = ask(server, {**sampling, **more, "custom_params": JACOBI})
        check_same(plain, ours, accepted=bool(more))  # one token again and again is guessed
        record = ours["meta_info"]["qspec"]
        assert record["proposed_tokens"] > 0
        assert record["accepted_by_source"]["jacobi"] == record["accepted_tokens"]


def test_sampled_answers_with_a_seed_stay(server: Server) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 32, "sampling_seed": 11}
    plain: dict[str, Any] = ask(server, {**sampling, "custom_params": PLAIN})
    ours = ask(server, {**sampling, "custom_params": JACOBI})
    assert ours["output_ids"] == plain["output_ids"]
    assert ours["meta_info"]["qspec"]["proposed_tokens"] > 0
