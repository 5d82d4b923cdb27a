"""The answers of earlier runs of `qspec batch`, as guesses for the lines of a later run."""

from __future__ import annotations

import argparse
import contextlib
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Self

import msgspec

from sglang_qspec.errors import BatchError
from sglang_qspec.guess_tags import OPEN_TAG, GuessLimits
from sglang_qspec.tools import declare
from sglang_qspec.tools.guesses.guess import Guess, fitted
from sglang_qspec.tools.guesses.postings import MAX_NUMBERS, Postings, hash_of
from sglang_qspec.tools.guesses.prompts import PromptIndex
from sglang_qspec.tools.guesses.texts import answers_in, prompt_in

logger = logging.getLogger(__name__)

MAX_GUESSES = 4
"""Maximum number of earlier answers for one line."""
MAX_LINE_BYTES = 128 << 20
"""Maximum length of a line of an earlier run: that of a record of `qspec batch`."""
READ_BYTES = 1 << 20
_FILE_SHIFT = 48
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Response(msgspec.Struct):
    body: msgspec.Raw
    status_code: int = 200


class _Record(msgspec.Struct):
    """The part of a written answer that the index needs."""

    custom_id: str
    response: _Response | None


@dataclass(frozen=True, slots=True)
class Earlier:
    """The files of an earlier run."""

    answers: Path
    """Its output."""
    requests: Path | None
    """Its input, which has the prompts; None if answers are found by their custom_id alone."""

    @classmethod
    def read(cls, text: str) -> Self:
        """The files in an option: ANSWERS, or ANSWERS,REQUESTS. Raises ValueError."""
        answers, comma, requests = text.rpartition(",")
        if not comma or Path(text).exists():
            answers, requests = text, ""
        if not answers:
            raise ValueError("ANSWERS or ANSWERS,REQUESTS: paths of JSONL files")
        return cls(Path(answers), Path(requests) if requests else None)


def add_option(parser: argparse._ActionsContainer) -> None:
    """Declare the option that names earlier runs."""
    declare.value(
        parser,
        "--guesses-from",
        "answers of an earlier run of qspec batch, which become guesses: its output, and after a "
        "comma its input, by whose prompts answers are found too; may be given several times",
        Earlier.read,
        "ANSWERS[,REQUESTS]",
        default=[],
        action="append",
    )


class EarlierAnswers:
    """Finds the answers of earlier runs by custom_id and by prompt.

    The answers stay in their files. An answer takes 16 bytes of memory, and about 200 more if its
    prompt is known.
    """

    def __init__(self) -> None:
        self._files: list[BufferedReader] = []
        self._places = array("Q")
        """File and offset of each answer, the earliest first."""
        self._ids = Postings()
        self._prompts: PromptIndex | None = None

    @classmethod
    def open(cls, runs: Sequence[Earlier]) -> Self:
        """Read the files of earlier runs, the earliest first. Raises BatchError."""
        found = cls()
        try:
            for run in runs:
                found._add(run)
        except BaseException:
            found.close()
            raise
        return found

    def __len__(self) -> int:
        return len(self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.pop().close()

    def find(self, custom_id: str | None, prompt: str) -> list[Guess]:
        """The texts of the answers that a line may get.

        These are the newest answers to the same custom_id, and the answer to an equal prompt, or
        else to the most similar one. A file that has changed meanwhile gives no guesses.
        """
        numbers: list[int] = []
        if custom_id is not None:
            numbers = self._ids.find(hash_of(custom_id))[-MAX_GUESSES:].tolist()[::-1]
        if self._prompts is not None:
            number = self._prompts.find(prompt)
            if number is not None:
                numbers = [*(numbers[: MAX_GUESSES - 1]), number]
        return [guess for number in dict.fromkeys(numbers) for guess in self._read(number)]

    def texts(self, prompt: str, limits: GuessLimits | None) -> list[str]:
        """The guesses for a prompt that has no custom_id, as a server with `limits` takes them.

        None without limits, and for a prompt with tags: they would become literal text.
        """
        if limits is None or OPEN_TAG in prompt:
            return []
        return fitted(self.find(None, prompt), limits)

    def _read(self, number: int) -> list[Guess]:
        """The texts of an answer."""
        place = self._places[number]
        file = self._files[place >> _FILE_SHIFT]
        with contextlib.suppress(OSError, *_DAMAGE):
            file.seek(place & ((1 << _FILE_SHIFT) - 1))
            record: Any = msgspec.json.decode(file.readline(MAX_LINE_BYTES))
            return answers_in(record["response"]["body"])
        return []

    def _add(self, run: Earlier) -> None:
        first = len(self)
        raw = _opened(run.answers)
        self._files.append(BufferedReader(raw))
        wrong = _Wrong(run.answers, "no answer of a batch")
        file_bits = (len(self._files) - 1) << _FILE_SHIFT
        for number, offset, text in _lines(raw, run.answers):
            try:
                record = msgspec.json.decode(text, type=_Record)
            except _DAMAGE:
                wrong.add(number)
                continue
            if record.response is not None and record.response.status_code == 200:
                self._ids.add(hash_of(record.custom_id), len(self))
                self._places.append(file_bits | offset)
        wrong.warn()
        if len(self) > MAX_NUMBERS:
            raise BatchError(f"{run.answers}: there are over {MAX_NUMBERS} earlier answers")
        if run.requests is not None:
            self._add_prompts(run.requests, first)

    def _add_prompts(self, path: Path, first: int) -> None:
        """Add the prompts of the answers from number `first` on."""
        self._prompts = self._prompts or PromptIndex()
        wrong = _Wrong(path, "no request of a batch")
        with _opened(path) as raw:
            for number, _, text in _lines(raw, path):
                custom_id, prompt = _request_in(text, number)
                if not prompt:
                    wrong.add(number)
                    continue
                for answer in self._ids.find(hash_of(custom_id)).tolist():
                    if answer >= first:
                        self._prompts.add(prompt, answer)
        wrong.warn()


def _request_in(text: bytes, number: int) -> tuple[str, str]:
    """The custom_id and the prompt of a line of an input; the prompt is empty if there is none."""
    try:
        fields = msgspec.json.decode(text)
    except _DAMAGE:
        return "", ""
    if not isinstance(fields, dict):
        return "", ""
    return str(fields.get("custom_id", number)), prompt_in(fields.get("body", fields))


class _Wrong:
    """Counts the lines of a file that cannot be used."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._first = self._count = 0

    def add(self, number: int) -> None:
        self._first = self._first or number
        self._count += 1

    def warn(self) -> None:
        """Log their number, if there are any."""
        if self._count:
            logger.warning(
                "%s:%d: the line is %s (%d lines in all); guesses are taken from the others",
                *(self._path, self._first, self._what, self._count),
            )


def _opened(path: Path) -> FileIO:
    """The file, which must allow to be read twice. Raises BatchError."""
    try:
        file = FileIO(path)
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror}") from None
    if not file.seekable():
        file.close()
        raise BatchError(f"{path} is a pipe, but guesses need a file that can be read again")
    return file


def _lines(file: FileIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and text of each line that is not blank. Raises BatchError."""
    reader = BufferedReader(file, READ_BYTES)
    offset = 0
    try:
        for number, text in enumerate(iter(lambda: reader.readline(MAX_LINE_BYTES), b""), 1):
            if text.strip():
                yield number, offset, text
            offset += len(text)
        reader.detach()
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror}") from None
