"""The contents of files, each in a regular file of one folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from sglang_qspec.errors import ConfigError

COPY_BYTES = 1 << 20


class Files:
    """The folder: `files` has whole contents, `running` the records of batches, and `incoming`
    uploads that are not complete."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, and lock it. Raises ConfigError if another service has it."""
        self._files, self._incoming = folder / "files", folder / "incoming"
        self._running = folder / "running"
        self.partial = folder / "partial.jsonl"
        """The path of the texts of answers that are not complete."""
        try:
            for each in (folder, self._files, self._incoming, self._running):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"--folder is {folder}, which another service uses") from None
        except OSError as error:
            reason = error.strerror
            raise ConfigError(f"--folder is {folder}, but cannot be used: {reason}") from None

    def path(self, id: str) -> Path:
        """The path of a file's content."""
        return self._files / id

    def records(self, batch_id: str) -> tuple[Path, Path]:
        """The paths of a running batch's answers and failures."""
        return self._running / f"{batch_id}.jsonl", self._running / f"{batch_id}.errors.jsonl"

    def write(self, id: str, source: IO[bytes]) -> None:
        """Write a file's content: all of it or nothing. Raises OSError."""
        with self._new() as (path, target):
            shutil.copyfileobj(source, target, COPY_BYTES)
            target.flush()
            os.fsync(target.fileno())
            self._move(path, id)

    @contextlib.contextmanager
    def _new(self) -> Iterator[tuple[Path, IO[bytes]]]:
        """A new file in `incoming`, which is removed if it is still there at the end."""
        with tempfile.NamedTemporaryFile(dir=self._incoming, delete=False) as target:
            path = Path(target.name)
            try:
                yield path, target
            finally:
                path.unlink(missing_ok=True)

    def keep(self, path: Path, id: str) -> int:
        """Make the records at `path` the content of a file; returns its size in bytes.

        It may have been done before. Without records the file is empty, and not there.
        """
        if path.exists():
            self._move(path, id)
        kept = self.path(id)
        return kept.stat().st_size if kept.exists() else 0

    def _move(self, path: Path, id: str) -> None:
        path.rename(self.path(id))
        folder = os.open(self._files, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self, id: str) -> None:
        """Remove a file's content, if it is there."""
        self.path(id).unlink(missing_ok=True)

    def sweep(self, ids: Collection[str], batch_ids: Collection[str]) -> None:
        """Remove what a killed service left: all but these files and records."""
        kept = {path for id in batch_ids for path in self.records(id)}
        for folder in (self._incoming, self._files, self._running):
            for path in folder.iterdir():
                if path not in kept and not (folder == self._files and path.name in ids):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another service use the folder."""
        os.close(self._lock)
