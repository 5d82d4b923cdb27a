"""The database of a store: SQLite in a file for one service, or PostgreSQL for several gateways.

Both take the same SQL with `?` for parameters. `Dialect` has the words in which they differ.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sglang_qspec.errors import BatchError, ConfigError, first_line

if TYPE_CHECKING:
    import psycopg

BUSY_S = 10.0
"""Maximum wait for another process that writes a SQLite database, in seconds."""
SCHEMES = ("postgresql://", "postgres://")
SCHEMA_NAME = "qspec_batches"
"""The schema of the tables in a PostgreSQL database."""
CREATION_LOCK = 0x71737065
"""Number of the advisory lock that a gateway has while it creates the tables."""
SESSION = (
    # A gateway that is stopped in a transaction must not stop the others.
    "SET idle_in_transaction_session_timeout = '10s'",
    "SET lock_timeout = '10s'",
    "SET statement_timeout = '30s'",
    f"SET search_path TO {SCHEMA_NAME}",
)
CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,  # milliseconds
    "application_name": "qspec serve-batches",
}
"""With these a host that vanishes is noticed within 20 s; the URL overrides them."""

Rows = list[tuple[Any, ...]]
Execute = Callable[[str, Sequence[object]], Rows]
"""Runs one statement with its parameters; returns its rows."""


@dataclass(frozen=True)
class Dialect:
    """The words in which the databases differ."""

    number: str
    """Type of a primary key that counts up."""
    blob: str
    """Type of bytes."""
    now: str
    """Unix time of the database in seconds."""
    for_update: str
    """Words after a SELECT that lock its rows until the end of the transaction."""
    lock_gateways: str | None
    """Statement after which no other gateway claims anything until the end of the transaction."""


class Database(Protocol):
    """A connection that one thread uses at a time."""

    dialect: Dialect
    is_shared: bool
    """Whether several gateways may use the database at once."""

    def create(self, schema: Sequence[str], version: int) -> None:
        """Create what is not there. Raises ConfigError if the database has another version."""

    def transaction(self) -> contextlib.AbstractContextManager[Execute]:
        """All statements of the block, or none, are in the database at its end.

        Raises BatchError if the database cannot be used.
        """

    def close(self) -> None:
        """Close the connection."""


class SqliteDatabase:
    """A file. A change is on the disk when its transaction ends (WAL, synchronous)."""

    is_shared = False
    dialect = Dialect(
        number="INTEGER PRIMARY KEY AUTOINCREMENT",
        blob="BLOB",
        now="CAST(strftime('%s', 'now') AS INTEGER)",
        for_update="",
        lock_gateways=None,  # each transaction locks the database
    )

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises ConfigError."""
        self._path = path
        try:
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def create(self, schema: Sequence[str], version: int) -> None:
        """As of `Database`; the version is SQLite's `user_version`."""
        try:
            (found,) = self._connection.execute("PRAGMA user_version").fetchone()
            if found not in (0, version):
                raise ConfigError(
                    f"{self._path} is a database of version {found}, but this is version {version}"
                )
            self._connection.execute("BEGIN IMMEDIATE")
            for statement in schema:
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {version}")
            self._connection.execute("COMMIT")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: sqlite3.Error) -> ConfigError:
        return ConfigError(f"{self._path} cannot be used as a database: {error}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Execute]:
        """As of `Database`."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._execute
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise BatchError(f"the database cannot be used: {error}") from None
        finally:
            if self._connection.in_transaction:
                self._connection.rollback()

    def _execute(self, statement: str, parameters: Sequence[object] = ()) -> Rows:
        return self._connection.execute(statement, parameters).fetchall()

    def close(self) -> None:
        """As of `Database`."""
        self._connection.close()


class PostgresDatabase:
    """A database on a server. A connection that breaks is made anew for the next transaction."""

    is_shared = True
    dialect = Dialect(
        number="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        blob="BYTEA",
        now="EXTRACT(EPOCH FROM clock_timestamp())",
        for_update=" FOR UPDATE",
        lock_gateways="LOCK TABLE gateways IN EXCLUSIVE MODE",
    )

    def __init__(self, url: str) -> None:
        """Connect. Raises ConfigError; no message shows the URL, which may have a password."""
        if not url.startswith(SCHEMES):
            allowed = " or ".join(f"{scheme}…" for scheme in SCHEMES)
            raise ConfigError(f"--database must be a URL {allowed}")
        if importlib.util.find_spec("psycopg") is None:
            raise ConfigError("--database needs psycopg: pip install 'sglang-qspec[postgres]'")
        import psycopg

        self._url, self._module = url, psycopg
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            raise ConfigError("--database is no valid URL of a PostgreSQL database") from None
        self._options: dict[str, Any] = {**CONNECTION, **given}
        self._connection: psycopg.Connection | None = None
        try:
            self._connected()
        except psycopg.Error as error:
            raise self._unusable(error) from None

    def _connected(self) -> psycopg.Connection:
        """The connection, or a new one if it is known to be broken."""
        if self._connection is None or self._connection.closed:
            connection = self._module.connect(autocommit=True, **self._options)
            for statement in SESSION:
                connection.execute(statement)
            self._connection = connection
        return self._connection

    def _unusable(self, error: psycopg.Error) -> ConfigError:
        return ConfigError(f"--database cannot be used: {first_line(error)}")

    def create(self, schema: Sequence[str], version: int) -> None:
        """As of `Database`; gateways that start at once create the tables one after another."""
        try:
            connection = self._connected()
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (CREATION_LOCK,))
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA_NAME}")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS versions (version INTEGER PRIMARY KEY)"
                )
                found = connection.execute("SELECT version FROM versions").fetchall()
                if found not in ([], [(version,)]):
                    raise ConfigError(
                        f"--database has tables of version {found[0][0]}, "
                        f"but this is version {version}"
                    )
                for statement in schema:
                    connection.execute(statement)
                if not found:
                    connection.execute("INSERT INTO versions VALUES (%s)", (version,))
        except self._module.Error as error:
            raise self._unusable(error) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Execute]:
        """As of `Database`."""
        try:
            with contextlib.ExitStack() as stack:
                connection = self._begin(stack)

                def execute(statement: str, parameters: Sequence[object] = ()) -> Rows:
                    cursor = connection.execute(statement.replace("?", "%s"), parameters)
                    return [] if cursor.description is None else cursor.fetchall()

                yield execute
        except self._module.Error as error:
            raise BatchError(f"the database cannot be used: {first_line(error)}") from None

    def _begin(self, stack: contextlib.ExitStack) -> psycopg.Connection:
        """Begin a transaction that `stack` ends, on a new connection if the old one is broken."""
        connection = self._connected()
        try:
            stack.enter_context(connection.transaction())
        except self._module.OperationalError:
            connection.close()
            connection = self._connected()
            stack.enter_context(connection.transaction())
        return connection

    def close(self) -> None:
        """As of `Database`."""
        if self._connection is not None:
            self._connection.close()
