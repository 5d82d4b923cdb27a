"""The state of files and batches, in a SQLite database.

Each object of the API is a row with its JSON. A change is one transaction, on the disk when the
method returns, so a killed service has every state that a client has seen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.serve_batches.objects import (
    Batch,
    Event,
    FileObject,
    Object,
    Status,
    encoded,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    label TEXT NOT NULL,
    size INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS messages (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    batch TEXT NOT NULL,
    body BLOB NOT NULL,
    tried INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS listed ON objects (kind, tenant, number);
"""
"""`label` is the purpose of a file or the status of a batch, and `size` the bytes of a file."""
VERSION = 1
"""Version of the schema, in SQLite's `user_version`."""
BUSY_S = 10.0
"""Maximum wait for another process that writes the database, in seconds."""
KINDS: dict[type[Object], str] = {FileObject: "file", Batch: "batch"}
FINAL = [status.value for status in Status if status.is_final]

Kind = TypeVar("Kind", FileObject, Batch)


class Message(NamedTuple):
    """A message about a batch that has ended, which no webhook has taken yet."""

    id: str
    tenant: str
    batch: str
    body: bytes
    tried: int
    """Number of attempts."""


class Totals(NamedTuple):
    """What a tenant has of one kind."""

    number: int
    bytes: int


class Store:
    """Owns the database. Only one thread at a time uses it."""

    def __init__(self, path: Path) -> None:
        """Open or create the database. Raises ConfigError if the file is none of this version."""
        try:
            self._database = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise ConfigError(
                    f"{path} is a database of version {version}, but this is version {VERSION}"
                )
            self._database.executescript(SCHEMA)
            self._database.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be used as a database: {error}") from None

    def messages(self, batch: str | None = None) -> list[Message]:
        """The messages that wait, of all batches or of one."""
        rows = self._database.execute(
            "SELECT id, tenant, batch, body, tried FROM messages WHERE batch = ?1 OR ?1 IS NULL",
            (batch,),
        )
        return [Message(*row) for row in rows]

    def note_attempt(self, message: str) -> None:
        """A message was not taken."""
        with self._database:
            self._database.execute("UPDATE messages SET tried = tried + 1 WHERE id = ?", (message,))

    def forget(self, message: str) -> None:
        """A message was taken, or is given up."""
        with self._database:
            self._database.execute("DELETE FROM messages WHERE id = ?", (message,))

    def add(self, tenant: str, *objects: Object) -> None:
        """Add objects, all or none."""
        rows = [
            (each.id, KINDS[type(each)], tenant, _label(each), _size(each), encoded(each))
            for each in objects
        ]
        names = "id, kind, tenant, label, size, body"
        with self._database:
            self._database.executemany(
                f"INSERT INTO objects ({names}) VALUES (?, ?, ?, ?, ?, ?)", rows
            )

    def put(
        self, tenant: str, changed: Batch, *added: FileObject, event: Event | None = None
    ) -> None:
        """Replace a batch, and add files and a message, all or nothing.

        Files that are there stay.
        """
        with self._database:
            if event is not None:
                self._database.execute(
                    "INSERT INTO messages (id, tenant, batch, body) VALUES (?, ?, ?, ?)",
                    (event.id, tenant, changed.id, encoded(event)),
                )
            self._database.execute(
                "UPDATE objects SET label = ?, body = ? WHERE id = ?",
                (_label(changed), encoded(changed), changed.id),
            )
            self._database.executemany(
                "INSERT OR IGNORE INTO objects (id, kind, tenant, label, size, body) "
                "VALUES (?, 'file', ?, ?, ?, ?)",
                [(each.id, tenant, _label(each), each.bytes, encoded(each)) for each in added],
            )

    def get(self, kind: type[Kind], id: str, tenant: str) -> Kind | None:
        """The tenant's object with this id."""
        found = self._database.execute(
            "SELECT body FROM objects WHERE id = ? AND kind = ? AND tenant = ?",
            (id, KINDS[kind], tenant),
        ).fetchone()
        return None if found is None else msgspec.json.decode(found[0], type=kind)

    def page(
        self,
        kind: type[Kind],
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        label: str | None = None,
        ascending: bool = False,
    ) -> tuple[list[Kind], bool]:
        """At most `limit` objects, and whether more follow; by default the newest come first.

        They follow the object with the id `after`, and have this `label`.
        """
        asked: list[object] = [KINDS[kind], tenant]
        where = "kind = ? AND tenant = ?"
        if label is not None:
            where += " AND label = ?"
            asked.append(label)
        if after is not None:
            sign = ">" if ascending else "<"
            where += f" AND number {sign} (SELECT number FROM objects WHERE id = ?)"
            asked.append(after)
        order = "ASC" if ascending else "DESC"
        rows = self._database.execute(
            f"SELECT body FROM objects WHERE {where} ORDER BY number {order} LIMIT ?",
            (*asked, limit + 1),
        ).fetchall()
        found = [msgspec.json.decode(body, type=kind) for (body,) in rows[:limit]]
        return found, len(rows) > limit

    def remove(self, id: str) -> None:
        """Remove an object, if it is there."""
        with self._database:
            self._database.execute("DELETE FROM objects WHERE id = ?", (id,))

    def running(self) -> list[tuple[str, Batch]]:
        """Tenant and batch of all batches whose state is not final, the oldest first."""
        marks = ", ".join("?" * len(FINAL))
        rows = self._database.execute(
            "SELECT tenant, body FROM objects WHERE kind = 'batch' "
            f"AND label NOT IN ({marks}) ORDER BY number",
            FINAL,
        )
        return [(tenant, msgspec.json.decode(body, type=Batch)) for tenant, body in rows]

    def files(self) -> list[tuple[str, FileObject]]:
        """Tenant and object of all files."""
        rows = self._database.execute("SELECT tenant, body FROM objects WHERE kind = 'file'")
        return [(tenant, msgspec.json.decode(body, type=FileObject)) for tenant, body in rows]

    def totals(self, kind: type[Object], tenant: str) -> Totals:
        """Number and size of a tenant's files, or the number of its running batches."""
        marks = ", ".join("?" * len(FINAL))
        count, size = self._database.execute(
            "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM objects "
            f"WHERE kind = ? AND tenant = ? AND label NOT IN ({marks})",
            (KINDS[kind], tenant, *FINAL),
        ).fetchone()
        return Totals(count, size)

    def close(self) -> None:
        """Close the database."""
        self._database.close()


def _label(value: Object) -> str:
    return value.purpose.value if isinstance(value, FileObject) else value.status.value


def _size(value: Object) -> int:
    return value.bytes if isinstance(value, FileObject) else 0


def ids_of(batches: Sequence[Batch]) -> set[str]:
    """The ids of the files that batches read or will write."""
    named = ((batch.input_file_id, batch.output_file_id, batch.error_file_id) for batch in batches)
    return {id for ids in named for id in ids if id is not None}
