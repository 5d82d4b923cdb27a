"""Prompts from files: both formats, and errors of a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models.prompts import UserPrompt, load


def write(path: Path, *lines: object) -> Path:
    file = path / "prompts.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(text))
    return file


def test_spec_bench_gives_the_first_turn_and_one_group_for_mt_bench(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 82, "category": "coding", "turns": ["Code."]},
        {"question_id": 321, "category": "qa", "turns": ["Who?"]},
    )
    assert load(file) == [
        UserPrompt("mt_bench", "Write."),
        UserPrompt("mt_bench", "Code."),
        UserPrompt("qa", "Who?"),
    ]


def test_a_prompt_without_a_group_is_in_the_group_all(tmp_path: Path) -> None:
    file = write(tmp_path, {"prompt": "One"}, "", {"prompt": "Two", "group": "math"})
    assert load(file) == [UserPrompt("all", "One"), UserPrompt("math", "Two")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "JSON is malformed"),
        ([1], "Expected `object`, got `array`"),
        ({"text": "x"}, "must have `turns`"),
        ({"category": "qa", "turns": []}, "of length >= 1 - at `$.turns`"),
        ({"turns": ["x"]}, "must have a `category`"),
        ({"prompt": "  "}, "at `$.prompt`"),
        ({"prompt": "x", "group": 3}, "Expected `str`, got `int` - at `$.group`"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_file_and_line(
    tmp_path: Path, line: object, message: str
) -> None:
    file = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(ConfigError) as error:
        load(file)
    assert str(error.value).startswith(f"{file}:2: ")
    assert message in str(error.value)


def test_a_file_that_is_missing_or_empty_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: the file has no prompt"):
        load(write(tmp_path, ""))
