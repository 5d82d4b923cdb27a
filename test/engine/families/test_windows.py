"""Greedy answers of models with windows, caps, sinks or latent keys do not depend on drafts.

Each checkpoint has random weights and a window of a few tokens, so that most nodes of a tree lie at
the edge of a window. SGLang's scheduler serves it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test.engine.families import checkpoints
from test.preloaded.interpreter import output_of

FAMILIES = (
    *("Cohere 2", "DeepSeek V2", "DeepSeek V3", "Gemma 2", "Gemma 3", "GPT-OSS", "Mistral"),
    "OLMo 3",
)
WINDOWS = {family: 8 + 3 * number for number, family in enumerate(FAMILIES)}
ORDINARY = "Gemma 2"
"""The family without --thorough: it has windows, a cap of the scores and one of the logits."""

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]


def served(folder: Path, **arguments: Any) -> dict[str, Any]:
    """The `Comparison` of `parity` for the checkpoint."""
    given = [str(folder), arguments]
    found: dict[str, Any] = output_of("test.engine.families.parity", given)
    assert not found["refused"] + found["failed"]
    return found


@pytest.mark.parametrize(
    "family",
    [
        family if family == ORDINARY else pytest.param(family, marks=pytest.mark.thorough)
        for family in WINDOWS
    ],
)
def test_lookups_and_branching_guesses_change_no_answer(family: str, tmp_path: Path) -> None:
    found = served(checkpoints.write(tmp_path, family, window=WINDOWS[family]))
    assert found["branching"]
    assert len({token for output in found["plain"] for token in output}) > 5
    for case, outputs in found["drafted"].items():
        assert outputs == found["plain"], case
        if "guesses" in case:
            assert found["accepted"][case] > sum(map(len, outputs)) / 3, case
