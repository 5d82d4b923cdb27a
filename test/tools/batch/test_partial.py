"""The file of unfinished texts: what is found again, and what it may cost."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from sglang_qspec.tools.batch import partial
from sglang_qspec.tools.batch.line import parse
from sglang_qspec.tools.batch.partial import Partials
from sglang_qspec.tools.guesses.guess import Guess
from test.tools.batch.scripted import line_of

ONE, TWO = line_of(1, "one"), line_of(2, "two")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.partial.jsonl"


def after(path: Path) -> Partials:
    """What a later process reads."""
    return Partials.open(path, resume=True)


def test_the_next_process_finds_the_newest_text_of_each_line(path: Path) -> None:
    partials = Partials.open(path, resume=False)
    partials.note(ONE, Guess("a", 1))
    partials.note(TWO, Guess("x\n\u2028\x00", 3))
    partials.note(ONE, Guess("a b c", 3))
    found = after(path)
    assert (found.find(ONE), found.find(TWO)) == (Guess("a b c", 3), Guess("x\n\u2028\x00", 3))


def test_a_note_appends_what_is_new_with_one_system_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partials = Partials.open(path, resume=False)
    partials.note(ONE, Guess("a" * 10_000, 10_000))
    calls: list[int] = []
    write = os.write

    def counted(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    partials.note(ONE, Guess("a" * 10_000 + "bc", 10_002))
    (size,) = calls
    assert size < 200
    assert after(path).find(ONE) == Guess("a" * 10_000 + "bc", 10_002)


def test_a_repeated_attempt_neither_shortens_the_text_nor_writes(path: Path) -> None:
    partials = Partials.open(path, resume=False)
    partials.note(ONE, Guess("a b c", 3))
    size = path.stat().st_size
    partials.note(ONE, Guess("a b", 2))
    assert partials.find(ONE) == Guess("a b c", 3)
    assert path.stat().st_size == size
    partials.note(ONE, Guess("other", 1))
    assert partials.find(ONE) == after(path).find(ONE) == Guess("other", 1)


def test_a_settled_line_is_forgotten_when_the_file_is_written_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "MIN_BYTES", 300)
    partials = Partials.open(path, resume=False)
    partials.note(ONE, Guess("one", 1))
    partials.settle(ONE)
    for length in range(1, 40):
        partials.note(TWO, Guess("ab" * length, length))
        assert path.stat().st_size < 700
    found = after(path)
    assert found.find(ONE) is None
    assert found.find(TWO) == Guess("ab" * 39, 39)


def test_a_text_of_another_request_is_not_found(path: Path) -> None:
    Partials.open(path, resume=False).note(ONE, Guess("a", 1))
    assert after(path).find(parse(1, b'{"custom_id": "one", "prompt": "two"}')) is None
    assert after(path).find(line_of(1, "two")) is None
    assert after(path).find(ONE) == Guess("a", 1)


def test_a_new_batch_does_not_read_the_texts_of_another(path: Path) -> None:
    Partials.open(path, resume=False).note(ONE, Guess("a", 1))
    assert Partials.open(path, resume=False).find(ONE) is None
    assert not path.exists()


def test_texts_survive_two_processes_that_do_not_reach_their_lines(path: Path) -> None:
    Partials.open(path, resume=False).note(ONE, Guess("a", 1))
    after(path).note(TWO, Guess("b", 1))
    found = after(path)
    assert (found.find(ONE), found.find(TWO)) == (Guess("a", 1), Guess("b", 1))


def test_a_file_that_is_torn_anywhere_gives_texts_that_were_written(path: Path) -> None:
    partials = Partials.open(path, resume=False)
    texts = {""}
    for length in range(1, 30):
        texts.add("é" * length)
        partials.note(ONE, Guess("é" * length, length))
    whole, chance = path.read_bytes(), random.Random(3)
    for _ in range(200):
        path.write_bytes(whole[: chance.randrange(len(whole))] + b"\0" * chance.randrange(3))
        found = after(path)
        guess = found.find(ONE) or Guess("", 0)
        assert guess.text in texts
        found.note(ONE, Guess(guess.text + "!", 1))
        assert after(path).find(ONE) == Guess(guess.text + "!", 1)


def test_a_piece_whose_beginning_is_missing_is_ignored(path: Path) -> None:
    partials = Partials.open(path, resume=False)
    for text in ("ab", "abcd", "abcdef"):
        partials.note(ONE, Guess(text, len(text)))
    first, _, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + last)
    assert after(path).find(ONE) == Guess("ab", 2)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\n", b"[]\n7\n", b'{"request": "x", "at": -1, "text": "", "tokens": 1}\n']
)
def test_a_file_of_something_else_gives_nothing(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert after(path).find(ONE) is None


def test_a_text_and_all_texts_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "MAX_CHARS", 100)
    monkeypatch.setattr(partial, "MAX_BYTES", 2000)
    monkeypatch.setattr(partial, "MIN_BYTES", 500)
    partials = Partials.open(path, resume=False)
    for number in range(1, 101):
        partials.note(line_of(number, f"prompt {number}"), Guess("a" * 1000, 500))
        assert path.stat().st_size < 4200
    assert partials.find(line_of(7, "prompt 7")) == Guess("a" * 100, 50)


def test_a_file_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partials = Partials.open(tmp_path / "absent" / "out", resume=False)
    for length in (1, 2):
        partials.note(ONE, Guess("a" * length, length))
    assert partials.find(ONE) == Guess("aa", 2)
    assert len(caplog.messages) == 1
    assert "cannot be written (No such file or directory)" in caplog.text


def test_without_a_file_the_texts_are_in_memory() -> None:
    with Partials.open(None, resume=True) as partials:
        partials.note(ONE, Guess("a", 1))
        assert partials.find(ONE) == Guess("a", 1)
        partials.remove()
        assert partials.find(ONE) is None
