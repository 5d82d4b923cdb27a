"""Reading the input: numbers, bad lines, duplicates, and the lines that are left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.batch import lines as lines_module
from sglang_qspec.tools.batch import source as source_module
from sglang_qspec.tools.batch.digests import Digests
from sglang_qspec.tools.batch.lines import Lines
from sglang_qspec.tools.batch.source import FileSource
from test.tools.batch.fakes import write_lines


def of(folder: Path, text: str, **options: Any) -> Lines:
    """The lines of an input with this text."""
    path = folder / "in.jsonl"
    path.write_text(text)
    return Lines(FileSource(str(path)), **options)


def of_prompts(folder: Path, *prompts: str, **options: Any) -> Lines:
    """The lines of an input with these prompts, which are the custom_ids too."""
    return Lines(FileSource(str(write_lines(folder / "in.jsonl", prompts))), **options)


def left(lines: Lines) -> list[tuple[int, str]]:
    """Number and custom_id of the lines to ask."""

    async def collect() -> list[tuple[int, str]]:
        return [(line.number, line.custom_id) async for line in lines.unanswered()]

    return asyncio.run(collect())


def answered(*custom_ids: str) -> Digests:
    digests = Digests()
    for custom_id in custom_ids:
        digests.add(custom_id)
    return digests


@pytest.mark.parametrize("end", ["\n", ""])
def test_blank_lines_count_and_are_left_out(tmp_path: Path, end: str) -> None:
    lines = of(tmp_path, '{"prompt": "a"}\n\n  \r\n{"prompt": "b"}' + end)
    lines.check()
    assert lines.total == 2
    assert left(lines) == [(1, "1"), (4, "4")]


def test_lines_longer_than_a_chunk_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "CHUNK_BYTES", 7)
    lines = of_prompts(tmp_path, "first " * 9, "b", "third " * 5)
    lines.check()
    assert [name for _, name in left(lines)] == ["first " * 9, "b", "third " * 5]


def test_answered_lines_are_left_out(tmp_path: Path) -> None:
    lines = of_prompts(tmp_path, "a", "b", "c", answered=answered("b"))
    lines.check()
    assert lines.total == 3
    assert left(lines) == [(1, "a"), (3, "c")]


def test_answers_to_other_lines_are_an_error(tmp_path: Path) -> None:
    lines = of_prompts(tmp_path, "a", "b", answered=answered("a", "x", "y"))
    with pytest.raises(BatchError, match="the output has 2 answers to lines that .* does not have"):
        lines.check()


def test_all_bad_lines_are_named_before_anything_starts(tmp_path: Path) -> None:
    records = [{"prompt": "a", "custom_id": "1"}, {}, {"prompt": "b", "custom_id": "1"}]
    lines = of(tmp_path, "".join(json.dumps(record) + "\n" for record in records) + "{")
    with pytest.raises(BatchError) as error:
        lines.check()
    heading, second, third, fourth = str(error.value).splitlines()
    assert heading.endswith("correct these lines, or give --skip-invalid:")
    assert second.startswith("line 2: must have `prompt`")
    assert third == "line 3: custom_id '1' is that of an earlier line too"
    assert fourth.startswith("line 4: is not JSON")


def test_lines_with_too_many_brackets_are_bad(tmp_path: Path) -> None:
    kinds = ('{"prompt": "a", "x": %s}', '{"messages": {"x": %s}}')
    deep = [kind % ("[" * n + "]" * n) for kind in kinds for n in range(900, 1100)]
    lines = of(tmp_path, "\n".join(deep), skip_invalid=True)
    lines.check()
    assert lines.total is not None
    assert lines.total + lines.invalid == 400
    with pytest.raises(BatchError, match="line 1: has too many brackets inside each other"):
        of(tmp_path, deep[199]).check()


def test_a_line_number_may_not_be_the_custom_id_of_an_earlier_line(tmp_path: Path) -> None:
    lines = of(tmp_path, '{"prompt": "a", "custom_id": "2"}\n{"prompt": "b"}\n')
    with pytest.raises(BatchError, match="line 2: custom_id '2' is that of an earlier line too"):
        lines.check()


def test_an_error_lists_a_bounded_number_of_lines(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="and 30 more lines") as error:
        of(tmp_path, "{}\n" * 50).check()
    assert len(str(error.value).splitlines()) == 22


def test_bad_lines_can_be_left_out(tmp_path: Path) -> None:
    lines = of(tmp_path, '{"prompt": "a"}\n{}\n{"prompt": "b"}\n', skip_invalid=True)
    lines.check()
    assert (lines.total, lines.invalid) == (2, 1)
    assert left(lines) == [(1, "1"), (3, "3")]


def test_the_number_of_lines_that_were_left_out_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of(tmp_path, "{}\n" * 50, skip_invalid=True).check()
    assert len(caplog.messages) == 21
    assert caplog.messages[-1] == "left out: and 30 more lines"


def test_a_line_that_is_too_long_is_bad_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lines_module, source_module):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(source_module, "CHUNK_BYTES", 1 << 18)
    text = '{"prompt": "' + "a" * (3 << 20) + '"}\n{"prompt": "b"}\n'
    lines = of(tmp_path, text, skip_invalid=True)
    lines.check()
    assert (lines.total, lines.invalid) == (1, 1)
    assert left(lines) == [(2, "2")]


def test_an_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="none.jsonl cannot be read: No such file"):
        Lines(FileSource(str(tmp_path / "none.jsonl"))).check()


def test_equal_lines_with_one_seed_get_seeds_of_their_own(tmp_path: Path) -> None:
    """The seeds do not depend on the lines that have answers already."""
    same = {"prompt": "Name an animal.", "seed": 7}
    others = [{"prompt": "Name a tree.", "seed": 7}, {"prompt": "Name an animal."}]
    path = tmp_path / "input.jsonl"
    bodies = [same, same, others[0], others[1], others[1], same]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    source = FileSource(str(path))

    async def seeds(*done: str) -> list[int | None]:
        lines = Lines(source, answered=answered(*done))
        return [json.loads(line.body).get("seed") async for line in lines.unanswered()]

    asked = asyncio.run(seeds())
    assert asked[0] == asked[2] == 7
    assert asked[3:5] == [None, None]
    assert len({asked[0], asked[1], asked[5]}) == 3
    assert asyncio.run(seeds("1", "2")) == asked[2:]
