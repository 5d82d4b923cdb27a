"""Private directories are closed to other users, and removed at their owner's end or death."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_qspec.errors import LinkError
from sglang_qspec.link import (
    Keys,
    PrivateEndpoint,
    remove_private,
    sweep_abandoned,
)
from sglang_qspec.link.address import MAX_PATH_BYTES, check_bind, check_connect
from test.link.wire import open_wire


@pytest.fixture
def temporary(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, for the duration of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    monkeypatch.setenv("TMPDIR", str(own))
    return own


def test_a_private_endpoint_has_a_directory_of_mode_0700_and_removes_it() -> None:
    private = PrivateEndpoint()
    directory = Path(private.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(os.fsencode(private.address.removeprefix("ipc://"))) <= MAX_PATH_BYTES
    check_bind(private.address, None)
    check_connect(private.address, None)
    private.close()
    assert not directory.exists()
    private.close()


def test_every_private_endpoint_has_its_own_directory() -> None:
    with PrivateEndpoint() as one, PrivateEndpoint() as other:
        assert one.address != other.address


def test_the_directory_is_removed_also_after_a_socket_was_bound_there(key_file: Keys) -> None:
    with open_wire("ipc", key_file) as wire:
        wire.serve()
        path = Path(wire.endpoint.removeprefix("ipc://"))
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.parent.exists()


def test_a_directory_that_is_too_deep_is_a_clear_error(own: Path) -> None:
    deep = own / ("d" * 100)
    deep.mkdir()
    with pytest.raises(LinkError, match=f"at most {MAX_PATH_BYTES} bytes"):
        PrivateEndpoint(str(deep))
    with pytest.raises(LinkError, match="cannot create a private directory"):
        PrivateEndpoint(str(own / "absent"))


def test_a_long_temporary_directory_is_no_obstacle(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = own / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with PrivateEndpoint() as private:
        assert private.directory.startswith("/tmp/")


def test_only_a_private_directory_is_removed(own: Path) -> None:
    elsewhere = own / "qspec-mine"
    elsewhere.mkdir()
    (elsewhere / "link").touch()
    (elsewhere / "letter").touch()
    for endpoint in (
        f"ipc://{elsewhere}/link",
        f"ipc://{own}/link",
        f"ipc://{elsewhere}/other",
        "tcp://127.0.0.1:5555",
    ):
        remove_private(endpoint)
    assert (elsewhere / "letter").exists()


def test_a_temporary_directory_in_which_others_can_replace_files_is_skipped(
    temporary: Path,
) -> None:
    temporary.chmod(0o777)
    with PrivateEndpoint() as private:
        assert Path(private.directory).parent == Path("/tmp")
    with pytest.raises(LinkError, match=f"chmod go-w {temporary}"):
        PrivateEndpoint(str(temporary))


OWNER = """
import sys, time
from sglang_qspec.link import PrivateEndpoint
private = PrivateEndpoint()
print(private.address, flush=True)
time.sleep(600)
"""


def _owner() -> tuple[subprocess.Popen[str], Path]:
    """A process with a private endpoint, and the directory of the endpoint."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip().removeprefix("ipc://")).parent


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_directory_of_a_killed_server_is_swept_and_that_of_a_live_one_stays(
    temporary: Path,
) -> None:
    (killed, abandoned), (living, used) = _owner(), _owner()
    bound = PrivateEndpoint()
    (Path(abandoned) / "link").touch()
    assert abandoned.parent == temporary
    sweep_abandoned()
    assert abandoned.exists()
    _kill(killed)
    sweep_abandoned()
    assert not abandoned.exists()
    assert used.exists()
    assert Path(bound.directory).exists()
    bound.close()
    _kill(living)
    sweep_abandoned()
    assert list(temporary.iterdir()) == []


def _abandoned(parent: Path, name: str = "qspec-abcd1234") -> Path:
    """The directory that a killed server leaves behind."""
    directory = parent / name
    directory.mkdir(mode=0o700)
    (directory / "owner").touch(mode=0o600)
    return directory


@pytest.mark.parametrize(
    "name", ["qspec-short", "qspec-abcd12345", "qspec-ABCD1234", "other-abcd1234", "qspec-abcd123."]
)
def test_a_directory_of_another_name_is_not_swept(temporary: Path, name: str) -> None:
    directory = _abandoned(temporary, name)
    sweep_abandoned()
    assert directory.exists()


def test_a_directory_that_deviates_from_ours_is_not_swept(temporary: Path) -> None:
    directory = _abandoned(temporary)
    (directory / "letter").touch()
    sweep_abandoned()
    assert len(list(directory.iterdir())) == 2
    (directory / "letter").unlink()
    # A directory that a server is creating has no owner file yet.
    (directory / "owner").rename(directory / "owner.new")
    sweep_abandoned()
    (directory / "owner.new").unlink()
    sweep_abandoned()
    assert directory.exists()
    (directory / "owner").mkdir()
    sweep_abandoned()
    (directory / "owner").rmdir()
    (directory / "owner").symlink_to("/dev/null")
    sweep_abandoned()
    (directory / "owner").unlink()
    (directory / "owner").touch()
    directory.chmod(0o755)
    sweep_abandoned()
    assert (directory / "owner").exists()
    directory.chmod(0o700)
    directory.rename(temporary / "elsewhere")
    directory.symlink_to(temporary / "elsewhere")
    sweep_abandoned()
    assert (temporary / "elsewhere" / "owner").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_swept(temporary: Path) -> None:
    directory = _abandoned(temporary)
    os.chown(directory, 12345, -1)
    sweep_abandoned()
    assert directory.exists()


def test_a_directory_that_is_being_created_is_not_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            sweep_abandoned()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with PrivateEndpoint() as private:
        sweep_abandoned()
        assert os.listdir(private.directory) == ["owner"]


def test_servers_that_start_at_the_same_time_do_not_sweep_each_other(temporary: Path) -> None:
    for number in range(40):
        _abandoned(temporary, f"qspec-dead{number:04}")

    def start(_: int) -> PrivateEndpoint:
        sweep_abandoned()
        private = PrivateEndpoint()
        sweep_abandoned()
        return private

    with ThreadPoolExecutor(8) as pool:
        started = list(pool.map(start, range(80)))
    directories = {Path(private.directory) for private in started}
    assert set(temporary.iterdir()) == directories
    for private in started:
        assert {path.name for path in Path(private.directory).iterdir()} == {"owner"}
        private.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("failing", ["flock", "rename"])
def test_a_directory_that_cannot_be_locked_is_removed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl if failing == "flock" else os, failing, fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkError, match="cannot create a private directory.*no locks available"):
        PrivateEndpoint()
    assert list(temporary.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
