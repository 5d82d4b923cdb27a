"""What has been measured, on disk at once: a run that is cut off can be reported and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import msgspec

FILE = "runs.jsonl"
Entry = TypeVar("Entry")
"""A line."""


class JournalError(ValueError):
    """The folder holds another run, or one that must not be overwritten."""


class Journal(Generic[Entry]):
    """A file of entries behind a first line that says what was to be measured.

    A subclass says what its entries are, a type that msgspec can read.
    """

    kind: ClassVar[type]

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self.path = path
        self.entries = entries

    @classmethod
    def open(cls, folder: Path, header: Mapping[str, str], resume: bool) -> Self:
        """The journal of `folder`, with its entries if it is resumed and otherwise empty.

        Raises JournalError if there is a journal and `resume` is False, or if it has another header
        and so other figures.
        """
        path = folder / FILE
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(header) + b"\n")
            return cls(path, [])
        if not resume:
            raise JournalError(f"{path}: there is a run already; go on with it by --resume")
        first, *lines = path.read_bytes().splitlines(keepends=True)
        written: dict[str, str] = msgspec.json.decode(first, type=dict[str, str])
        for name in sorted(written.keys() | header.keys()):
            if written.get(name) != header.get(name):
                raise JournalError(
                    f"{path}: cannot be resumed, since its {name} is {written.get(name)}, "
                    f"and that of this run {header.get(name)}"
                )
        if lines and not lines[-1].endswith(b"\n"):
            # It was cut off while it was written.
            path.write_bytes(b"".join([first, *lines[:-1]]))
            lines.pop()
        return cls(path, [msgspec.json.decode(line, type=cls.kind) for line in lines])

    def add(self, entry: Entry) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        self.entries.append(entry)
