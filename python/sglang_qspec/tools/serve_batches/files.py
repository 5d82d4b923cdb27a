"""The contents of files, each in a regular file of one folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from sglang_qspec.errors import ConfigError

COPY_BYTES = 1 << 20
DATABASE = "state.db"
"""The name of the database of a service that uses the folder alone."""
PARTIAL = "partial.jsonl"
LOCK_ATTEMPTS, LOCK_PAUSE_S = 50, 0.2
"""A gateway that starts has the folder alone for a moment; others wait for it."""


class Files:
    """The folder: `files` has whole contents, `running` the records of batches, and `incoming`
    uploads that are not complete."""

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        """Create the folder, and lock it: for this service alone, or for all with a database.

        Raises ConfigError if another service has it, or if it has the state of a service of the
        other kind.
        """
        self._folder = folder
        self._files, self._incoming = folder / "files", folder / "incoming"
        self._running = folder / "running"
        self._identity = folder / "identity"
        self.is_alone = False
        """Whether no other gateway uses the folder, and none can begin to."""
        try:
            for each in (folder, self._files, self._incoming, self._running):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._take(folder, is_shared=is_shared)
        except OSError as error:
            reason = error.strerror
            raise ConfigError(f"--folder is {folder}, but cannot be used: {reason}") from None

    def _take(self, folder: Path, *, is_shared: bool) -> None:
        """Lock the folder. Raises ConfigError and OSError."""
        try:
            if is_shared and (folder / DATABASE).exists():
                raise ConfigError(f"--folder is {folder}, which a service without --database has")
            if not is_shared and self._identity.exists():
                raise ConfigError(f"--folder is {folder}, which needs its --database")
            for _ in range(LOCK_ATTEMPTS if is_shared else 1):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self.is_alone = True
                    return
                with contextlib.suppress(BlockingIOError):
                    if is_shared:
                        self.share()
                        return
                time.sleep(LOCK_PAUSE_S)
            raise ConfigError(f"--folder is {folder}, which another service uses")
        except BaseException:
            os.close(self._lock)
            raise

    def share(self) -> None:
        """Let other gateways use the folder too."""
        fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.is_alone = False

    @property
    def is_empty(self) -> bool:
        """Whether no file was ever kept, or all were removed."""
        return not any(self._files.iterdir())

    def identity(self) -> str:
        """The id of the folder, the same for all gateways."""
        if not self._identity.exists():
            with self._new() as (path, target):
                target.write(secrets.token_hex(12).encode())
                target.flush()
                os.fsync(target.fileno())
                with contextlib.suppress(FileExistsError):
                    os.link(path, self._identity)
        return self._identity.read_text()

    def partial(self, gateway: str | None) -> Path:
        """The path of the texts of answers that are not complete, for each gateway its own."""
        return self._folder / (PARTIAL if gateway is None else f"{gateway}.{PARTIAL}")

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

    def sweep(
        self, ids: Collection[str], batch_ids: Collection[str], gateways: Collection[str] = ()
    ) -> None:
        """Remove what a killed service left: all but these files and records, and the texts of
        these gateways."""
        kept = {path for id in batch_ids for path in self.records(id)}
        kept |= {self.partial(id) for id in gateways}
        for path in self._folder.glob(f"*.{PARTIAL}"):
            if path not in kept:
                path.unlink(missing_ok=True)
        for folder in (self._incoming, self._files, self._running):
            for path in folder.iterdir():
                if path not in kept and not (folder == self._files and path.name in ids):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another service use the folder."""
        os.close(self._lock)
