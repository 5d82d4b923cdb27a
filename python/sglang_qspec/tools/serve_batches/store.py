"""The state of files and batches, in a database.

Each object of the API is a row with its JSON. A change is one transaction, on the disk when the
method returns, so a killed service has every state that a client has seen.

Several gateways may share a PostgreSQL database. Each has a row in `gateways` with the time until
which it counts as alive, a lease, and renews it with `beat`. A batch that has not ended is served,
and a message sent, by the gateway that has its row in `claims`. Once a lease is over, the next
gateway that beats takes the claims. Only the gateway with the claim changes a batch (a
cancellation is a request to it), so one that was stopped for a while does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from sglang_qspec.errors import ClaimLostError, ConfigError
from sglang_qspec.tools.serve_batches.database import Database, Execute
from sglang_qspec.tools.serve_batches.objects import (
    Batch,
    BatchStatus,
    FileObject,
    Object,
    encoded,
    event_of,
    new_id,
)

RUNNING = ", ".join(f"'{status.value}'" for status in BatchStatus if not status.is_final)
IS_RUNNING = f"kind = 'batch' AND label IN ({RUNNING})"
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS objects (
        number {number},
        id TEXT NOT NULL UNIQUE,
        kind TEXT NOT NULL,
        tenant TEXT NOT NULL,
        label TEXT NOT NULL,
        size BIGINT NOT NULL,
        body {blob} NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS messages (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        batch TEXT NOT NULL,
        body {blob} NOT NULL,
        tried INTEGER NOT NULL DEFAULT 0
    )""",
    """CREATE TABLE IF NOT EXISTS gateways (
        id TEXT PRIMARY KEY,
        alive_until DOUBLE PRECISION NOT NULL
    )""",
    "CREATE TABLE IF NOT EXISTS claims (id TEXT PRIMARY KEY, gateway TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS folders (number INTEGER PRIMARY KEY, id TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS listed ON objects (kind, tenant, number)",
    f"CREATE INDEX IF NOT EXISTS running ON objects (number) WHERE {IS_RUNNING}",
)
"""`label` is the purpose of a file or the status of a batch, and `size` the bytes of a file. A
claim has the id of a batch or of a message. `folders` has one row at most."""
VERSION = 1
"""Version of the schema."""
LEASE_S = 15
"""Seconds after its last `beat` for which a gateway counts as alive."""
KINDS: dict[type[Object], str] = {FileObject: "file", Batch: "batch"}

Kind = TypeVar("Kind", FileObject, Batch)


class Message(NamedTuple):
    """A message about a batch that has ended, which no webhook has taken yet."""

    id: str
    tenant: str
    batch: str
    body: bytes
    tried: int
    """Number of attempts."""


class StoredTotals(NamedTuple):
    """What a tenant has of one kind."""

    number: int
    bytes: int


class Claimed(NamedTuple):
    """What a gateway has to do."""

    batches: Sequence[tuple[str, Batch]]
    """Tenant and batch, the oldest first."""
    messages: Sequence[Message]
    ended: Sequence[str]
    """Ids of the gateways from which it has just taken claims."""
    is_alone: bool
    """Whether no other gateway is alive."""


class Store:
    """Owns the state, as one gateway. Only one thread at a time uses it."""

    def __init__(self, database: Database) -> None:
        """Create the tables if they are not there. Raises ConfigError."""
        self.gateway = new_id("gateway_")
        """Id of this gateway, another one for each start."""
        self.is_shared = database.is_shared
        """Whether other gateways may use the database."""
        self._database = database
        words = database.dialect
        self._now, self._for_update, self._lock = words.now, words.for_update, words.lock_gateways
        schema = [each.format(number=words.number, blob=words.blob) for each in SCHEMA]
        database.create(schema, VERSION)
        if not self.is_shared:  # the lock of the folder says that no other gateway is alive
            with database.transaction() as execute:
                execute("DELETE FROM gateways", ())

    # Gateways

    def bind(self, folder: str, *, is_empty: bool) -> None:
        """Let the database belong to the folder with this id.

        Raises ConfigError if it belongs to another one, or if the folder has files that the
        database does not know.
        """
        with self._database.transaction() as execute:
            if is_empty:
                new = "INSERT INTO folders (number, id) VALUES (1, ?) ON CONFLICT DO NOTHING"
                execute(new, (folder,))
            found = execute("SELECT id FROM folders", ())
        if found != [(folder,)]:
            raise ConfigError(
                "--database belongs to another --folder; all gateways of a database need the same "
                "folder, and a folder needs one database"
            )

    def beat(self) -> Claimed:
        """Renew the lease of this gateway, and claim what no living gateway has."""
        with self._database.transaction() as execute:
            if self._lock is not None:
                execute(self._lock, ())
            execute(
                f"INSERT INTO gateways (id, alive_until) VALUES (?, {self._now} + {LEASE_S}) "
                "ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until",
                (self.gateway,),
            )
            late = execute(
                f"SELECT id FROM gateways WHERE alive_until < {self._now} AND id <> ?",
                (self.gateway,),
            )
            for row in late:
                execute("DELETE FROM gateways WHERE id = ?", row)
            for name, condition in (("objects", IS_RUNNING), ("messages", "TRUE")):
                execute(
                    f"INSERT INTO claims (id, gateway) SELECT id, ? FROM {name} "
                    f"WHERE {condition} AND id NOT IN (SELECT claims.id FROM claims "
                    "JOIN gateways ON gateways.id = claims.gateway) "
                    "ON CONFLICT (id) DO UPDATE SET gateway = excluded.gateway",
                    (self.gateway,),
                )
            own = "JOIN claims USING (id) WHERE claims.gateway = ?"
            batches = execute(
                f"SELECT tenant, body FROM objects {own} AND {IS_RUNNING} ORDER BY number",
                (self.gateway,),
            )
            messages = execute(
                f"SELECT id, tenant, batch, body, tried FROM messages {own}", (self.gateway,)
            )
            ((living,),) = execute("SELECT COUNT(*) FROM gateways", ())
        return Claimed(
            [(tenant, msgspec.json.decode(body, type=Batch)) for tenant, body in batches],
            [Message(*row) for row in messages],
            [id for (id,) in late],
            living == 1,
        )

    def leave(self) -> None:
        """End the lease, so that the next gateway that beats takes the claims."""
        with self._database.transaction() as execute:
            execute("UPDATE gateways SET alive_until = 0 WHERE id = ?", (self.gateway,))

    def _claim(self, execute: Execute, id: str) -> None:
        execute("INSERT INTO claims (id, gateway) VALUES (?, ?)", (id, self.gateway))

    def _check_claim(self, execute: Execute, id: str) -> None:
        """Raise ClaimLostError if another gateway serves the batch, or if it has ended."""
        asked = f"SELECT gateway FROM claims WHERE id = ?{self._for_update}"
        if execute(asked, (id,)) != [(self.gateway,)]:
            raise ClaimLostError(f"{id} is no longer served by this gateway")

    # Messages

    def messages(self, batch: str | None = None) -> list[Message]:
        """The messages that wait, of all batches or of one."""
        where, asked = ("", ()) if batch is None else (" WHERE batch = ?", (batch,))
        with self._database.transaction() as execute:
            rows = execute(f"SELECT id, tenant, batch, body, tried FROM messages{where}", asked)
        return [Message(*row) for row in rows]

    def note_attempt(self, message: str) -> None:
        """A message was not taken."""
        with self._database.transaction() as execute:
            execute("UPDATE messages SET tried = tried + 1 WHERE id = ?", (message,))

    def forget(self, message: str) -> None:
        """A message was taken, or is given up."""
        with self._database.transaction() as execute:
            for table in ("messages", "claims"):
                execute(f"DELETE FROM {table} WHERE id = ?", (message,))

    # Objects

    def add(self, tenant: str, *objects: Object) -> None:
        """Add objects, all or none; this gateway serves the batches among them."""
        with self._database.transaction() as execute:
            for each in objects:
                _insert(execute, tenant, each)
                if isinstance(each, Batch):
                    self._claim(execute, each.id)

    def change(
        self,
        tenant: str,
        id: str,
        change: Callable[[Batch], Batch],
        *added: FileObject,
        anyone: bool = False,
    ) -> Batch:
        """Replace a batch by what `change` returns for it, and add files, all or nothing.

        If the batch ends, there is a message about it. Nothing else changes the batch meanwhile.
        `change` may raise, and then nothing changes. Files that are there stay. Raises
        ClaimLostError if another gateway serves the batch, unless `anyone` may change it.
        """
        with self._database.transaction() as execute:
            if not anyone:
                self._check_claim(execute, id)
            asked = f"SELECT body FROM objects WHERE id = ? AND tenant = ?{self._for_update}"
            ((body,),) = execute(asked, (id, tenant))  # batches are never removed
            before = msgspec.json.decode(body, type=Batch)
            after = change(before)
            if after is before and not added:
                return after
            new = (_label(after), encoded(after), id)
            execute("UPDATE objects SET label = ?, body = ? WHERE id = ?", new)
            for each in added:
                _insert(execute, tenant, each)
            if after.status.is_final and not before.status.is_final:
                execute("DELETE FROM claims WHERE id = ?", (id,))
                event = event_of(after)
                execute(
                    "INSERT INTO messages (id, tenant, batch, body) VALUES (?, ?, ?, ?)",
                    (event.id, tenant, id, encoded(event)),
                )
                self._claim(execute, event.id)
        return after

    def get(self, kind: type[Kind], id: str, tenant: str) -> Kind | None:
        """The tenant's object with this id."""
        with self._database.transaction() as execute:
            found = execute(
                "SELECT body FROM objects WHERE id = ? AND kind = ? AND tenant = ?",
                (id, KINDS[kind], tenant),
            )
        return msgspec.json.decode(found[0][0], type=kind) if found else None

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
        with self._database.transaction() as execute:
            rows = execute(
                f"SELECT body FROM objects WHERE {where} ORDER BY number {order} LIMIT ?",
                (*asked, limit + 1),
            )
        found = [msgspec.json.decode(body, type=kind) for (body,) in rows[:limit]]
        return found, len(rows) > limit

    def remove(self, id: str) -> None:
        """Remove an object, if it is there."""
        with self._database.transaction() as execute:
            execute("DELETE FROM objects WHERE id = ?", (id,))

    def running(self) -> list[Batch]:
        """All batches that have not ended, the oldest first."""
        with self._database.transaction() as execute:
            rows = execute(f"SELECT body FROM objects WHERE {IS_RUNNING} ORDER BY number", ())
        return [msgspec.json.decode(body, type=Batch) for (body,) in rows]

    def files(self) -> list[tuple[str, FileObject]]:
        """Tenant and object of all files."""
        with self._database.transaction() as execute:
            rows = execute("SELECT tenant, body FROM objects WHERE kind = 'file'", ())
        return [(tenant, msgspec.json.decode(body, type=FileObject)) for tenant, body in rows]

    def totals(self, kind: type[Object], tenant: str) -> StoredTotals:
        """Number and size of a tenant's files, or the number of its running batches."""
        where = IS_RUNNING if kind is Batch else "kind = 'file'"
        with self._database.transaction() as execute:
            ((count, size),) = execute(
                f"SELECT COUNT(*), COALESCE(SUM(size), 0) FROM objects WHERE {where} "
                "AND tenant = ?",
                (tenant,),
            )
        return StoredTotals(count, int(size))

    def close(self) -> None:
        """Close the database."""
        self._database.close()


def _insert(execute: Execute, tenant: str, value: Object) -> None:
    """Add an object, unless it is there."""
    execute(
        "INSERT INTO objects (id, kind, tenant, label, size, body) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (value.id, KINDS[type(value)], tenant, _label(value), _size(value), encoded(value)),
    )


def _label(value: Object) -> str:
    return value.purpose.value if isinstance(value, FileObject) else value.status.value


def _size(value: Object) -> int:
    return value.bytes if isinstance(value, FileObject) else 0


def ids_of(batches: Sequence[Batch]) -> set[str]:
    """The ids of the files that batches read or will write."""
    named = ((batch.input_file_id, batch.output_file_id, batch.error_file_id) for batch in batches)
    return {id for ids in named for id in ids if id is not None}
