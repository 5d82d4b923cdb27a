"""A PostgreSQL server of the tests: Debian's programs, in a folder and at a port of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_qspec.tools.ports import free_port

USER, PASSWORD = "qspec", "mis:take"
UNPRIVILEGED = ("postgres", "nobody")
"""Users of the system as which the server may run; it refuses to run as root."""
LIMIT_S = 60.0


class Postgres:
    """A server that can be stopped and started again."""

    def __init__(self, folder: Path, programs: Path, user: str | None) -> None:
        self._data, self._programs, self._user = folder / "data", programs, user
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.names: list[str] = []
        """The databases of `new_url`."""
        password = folder / "password"
        password.write_text(PASSWORD)
        if user is not None:
            for path in (folder, password):
                shutil.chown(path, user)
        self._run(
            *("initdb", "--username", USER, "--pwfile", password, "--auth", "scram-sha-256"),
            *("--no-sync", "--encoding", "UTF8", "--pgdata", self._data),
        )

    def url(self, name: str = "postgres") -> str:
        """The URL of a database, with the password."""
        escaped = PASSWORD.replace(":", "%3A")
        return f"postgresql://{USER}:{escaped}@127.0.0.1:{self._port}/{name}"

    def new_url(self, name: str) -> str:
        """The URL of a new database."""
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        self.names.append(name)
        return self.url(name)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        import psycopg

        given = {"listen_addresses": "127.0.0.1", "port": self._port, "fsync": "off"}
        options = [f"--{name}={value}" for name, value in given.items()]
        command = [self._programs / "postgres", "-D", self._data, *options]
        sockets = ["-c", f"unix_socket_directories={self._data}"]
        self._process = subprocess.Popen(
            [*map(str, command), *sockets],
            user=self._user,
            cwd=self._data,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                psycopg.connect(self.url()).close()
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, "PostgreSQL does not start"
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """End the server, and break its connections."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
            self._process.wait(LIMIT_S)

    def _run(self, program: str, *arguments: str | Path) -> None:
        subprocess.run(
            [str(self._programs / program), *map(str, arguments)],
            user=self._user,
            cwd=self._data.parent,
            stdout=subprocess.DEVNULL,
            check=True,
        )


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A server; without its programs or psycopg the test is skipped."""
    pytest.importorskip("psycopg", reason="needs psycopg")
    programs = _programs()
    if programs is None:
        pytest.skip("needs PostgreSQL (apt install postgresql)")
    user = None
    if os.geteuid() == 0:
        known = {each.pw_name for each in pwd.getpwall()}
        user = next((name for name in UNPRIVILEGED if name in known), None)
        if user is None:
            pytest.skip("needs an unprivileged user for PostgreSQL")
    with tempfile.TemporaryDirectory(prefix="qspec-postgres-") as folder:
        found = Postgres(Path(folder), programs, user)
        found.start()
        try:
            yield found
        finally:
            found.stop()


def _programs() -> Path | None:
    """The folder of `initdb` and `postgres`, which Debian does not have in PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    known = shutil.which("postgres")
    if known is not None:
        folders.append(Path(known).parent)
    return next((each for each in folders if (each / "initdb").exists()), None)
