"""Keeps the measured cells of a run in a file, so that a later run can report and resume them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from benchmark.harness.cells import Cell
from benchmark.harness.run import Run

FILE = "runs.jsonl"


def digest(load: Any) -> str:
    """A hash of a load, for the header of a journal."""
    return hashlib.sha256(msgspec.json.encode(load)).hexdigest()


class JournalError(ValueError):
    """The folder holds a run with another header, or one that must not be overwritten."""


class Journal:
    """A file with a header in the first line, and the run of a cell in each further line."""

    def __init__(self, path: Path, runs: dict[Cell, Run]) -> None:
        self.path = path
        self.runs = runs

    @classmethod
    def open(cls, folder: Path, header: Mapping[str, str], resume: bool) -> Self:
        """The journal of `folder`, with its runs if `resume`, and otherwise empty.

        Raises JournalError if there is a journal and `resume` is False, or if its header differs.
        """
        path = folder / FILE
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(header) + b"\n")
            return cls(path, {})
        if not resume:
            raise JournalError(f"{path} exists: continue that run with --resume")
        first, *lines = path.read_bytes().splitlines(keepends=True)
        written: dict[str, str] = msgspec.json.decode(first, type=dict[str, str])
        for name in sorted(written.keys() | header.keys()):
            if written.get(name) != header.get(name):
                raise JournalError(
                    f"{path} cannot be resumed: its {name} is {written.get(name)}, "
                    f"and {header.get(name)} in this run"
                )
        if lines and not lines[-1].endswith(b"\n"):
            # The process ended during the write of this line.
            path.write_bytes(b"".join([first, *lines[:-1]]))
            lines.pop()
        decoder = msgspec.json.Decoder(tuple[Cell, Run])
        return cls(path, dict(map(decoder.decode, lines)))

    def add(self, cell: Cell, run: Run) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode((cell, run)) + b"\n")
        self.runs[cell] = run
