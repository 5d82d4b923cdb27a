"""The files of prompts that `qspec show` offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.show import prompts


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "One?\n\n  Two?\n", ["One?", "Two?"]),
        (
            "a.jsonl",
            '{"prompt": "One?"}\n{"category": "qa", "turns": ["Two?", "Three?"]}\n',
            ["One?", "Two?"],
        ),
    ],
)
def test_a_file_has_a_prompt_in_each_line(
    tmp_path: Path, name: str, text: str, expected: list[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert prompts.load(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "\n", "has 0 prompts, but must have 1 to 1000"),
        ("a.txt", "x\n" * 1001, "has 1001 prompts"),
        ("a.jsonl", '{"prompt": "a"}\n{', r"a\.jsonl:2: "),
        ("a.jsonl", '{"question": "a"}', r"a\.jsonl:1: a line must have"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        prompts.load(tmp_path / name)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        prompts.load(tmp_path / "absent")
