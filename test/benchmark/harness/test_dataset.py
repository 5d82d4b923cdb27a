"""Prompts in groups: an even selection, and those that fit the context."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.harness import dataset
from benchmark.harness.dataset import by_group, fitting, mixed, spread
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models.prompts import UserPrompt


def test_groups_keep_the_order_of_the_file_and_unknown_ones_are_refused() -> None:
    prompts = [UserPrompt("qa", "1"), UserPrompt("rag", "2"), UserPrompt("qa", "3")]
    assert list(by_group(prompts)) == ["qa", "rag"]
    assert by_group(prompts, ["rag", "qa"]) == {
        "qa": [UserPrompt("qa", "1"), UserPrompt("qa", "3")],
        "rag": [UserPrompt("rag", "2")],
    }
    with pytest.raises(ConfigError, match="no group 'math'; there are qa, rag"):
        by_group(prompts, ["math"])


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(None, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5]), (3, [0, 2, 4]), (4, [0, 1, 3, 4])],
)
def test_a_selection_is_spread_evenly(count: int | None, chosen: list[int]) -> None:
    assert spread(range(6), count) == chosen


def test_prompts_longer_than_the_context_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Tokenizer:
        """One token per character."""

        input_ids: str

        def __call__(self, text: str) -> Tokenizer:
            self.input_ids = text
            return self

    monkeypatch.setattr(dataset, "tokenizer_of", lambda _: Tokenizer())
    monkeypatch.setattr(dataset, "render", lambda _, prompts: prompts)
    path = tmp_path / "prompts.jsonl"
    prompts = [("qa", "a" * 9), ("qa", "b" * 10), ("qa", "c"), ("rag", "e" * 99)]
    lines = (f'{{"group": "{group}", "prompt": "{text}"}}\n' for group, text in prompts)
    path.write_text("".join(lines))
    assert fitting("bench", path, Path("m"), 9) == (
        {"qa": ["a" * 9, "c"]},
        {"qa": 1, "rag": 1},
    )
    with pytest.raises(SystemExit, match="no prompt has at most 0 tokens"):
        fitting("bench", path, Path("m"), 0)


def test_the_prompts_of_all_groups_take_turns() -> None:
    assert mixed({"qa": ["q0", "q1", "q2"], "rag": ["r0"]}) == ["q0", "r0", "q1", "q2"]
