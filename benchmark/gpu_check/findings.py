"""The results of a part of the check; the part's process writes them to a file after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmark.harness.report import Table
from benchmark.harness.server import reason


class NotHereError(Exception):
    """A check cannot run on this machine; the message says why."""


class Options(msgspec.Struct, frozen=True):
    """How the parts run."""

    device: str
    """`cuda` or `cpu`."""
    emulated: bool
    """Whether a CPU stands in for the GPU, with the smallest loads."""
    flags: Sequence[str] = ()
    """More flags for every server."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass
class Findings:
    """The checks, figures and tables of one part."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by check; the name is empty for the part as a whole."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by check; the name is empty for the part as a whole."""
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    identical: bool | None = None
    """Whether greedy answers with and without QSPEC are equal; None if the part does not know."""
    eager_passes: int | None = None
    """Passes of the target outside CUDA graphs; None if the part did not count them."""
    seconds: float = 0.0
    peak_mib: int | None = None
    """Largest memory in use on all GPUs together, in MiB; None if it was not measured."""

    @classmethod
    def load(cls, path: Path) -> Findings:
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Steps:
    """Runs the steps of a part, and writes the findings to `path` after each of them."""

    def __init__(self, path: Path | None = None) -> None:
        self.found = Findings()
        self._path = path

    @contextmanager
    def check(self, name: str = "") -> Iterator[None]:
        """Record whether the body passes, fails by an exception, or cannot run here.

        An exception ends the body only, so that one failure does not hide the later checks. An
        empty name stands for the part as a whole.
        """
        try:
            yield
        except NotHereError as error:
            self.found.skipped[name] = str(error)
        except Exception as error:
            self.found.failed[name] = f"{type(error).__name__}: {reason(error)}"
        else:
            if name:
                self.found.passed.append(name)
        self.save()

    def save(self) -> None:
        """Write the findings so far. A reader sees either the old or the new file."""
        if self._path is not None:
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(msgspec.json.encode(self.found))
            fresh.replace(self._path)
