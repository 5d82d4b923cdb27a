"""What `bench_draft_head` counts, over a scripted draft model."""

from __future__ import annotations

import pytest

from benchmark.bench_draft_head import Timed, drafted, row_of
from sglang_qspec.sidecar.drafter import Drafter
from test.sidecar.scripted import ScriptedModel
from test.sidecar.scripted_head import ScriptedHead, eager


def test_tokens_behind_the_first_ones_are_counted() -> None:
    model = ScriptedModel()
    head = eager(ScriptedHead(model, lambda text: text[-1] + 1))
    for guesser, guesses in ((None, 0), (head, 8)):
        drafter = Drafter(model, apart=True, guesser=guesser)
        found = drafted(drafter, [[1, 2, 3], [7, 8]], 9, greedy=True)
        assert (found.tokens, found.guessed, found.right) == (16, guesses, guesses)
        assert drafter.idle
        assert model.rows.open_rows == 0


def test_a_row_compares_the_time_of_a_token() -> None:
    rounds = [
        (Timed(20, 2.0, 0, 0), Timed(20, 1.6, 8, 4)),
        (Timed(20, 3.0, 0, 0), Timed(20, 3, 2, 1)),
    ]
    row = row_of(2, "greedy", rounds)
    assert row["token_ms"] == pytest.approx(250)
    assert row["gains"] == pytest.approx([1.25, 1.0])
    assert (row["verified"], row["right"]) == (0.25, 0.5)
