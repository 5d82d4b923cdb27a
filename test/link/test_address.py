"""Endpoints: private directories, and which addresses are allowed."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.errors import LinkError
from sglang_qspec.link import Keys, PrivateEndpoint, private_endpoint, remove_private
from sglang_qspec.link.address import MAX_PATH_BYTES, check_bind, check_connect
from test.link.wire import open_wire


@pytest.fixture
def own() -> Iterator[Path]:
    """A directory with a short path that only this user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_a_private_endpoint_lies_in_a_closed_directory_that_goes_with_it() -> None:
    private = private_endpoint()
    directory = Path(private.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(os.fsencode(private.address.removeprefix("ipc://"))) <= MAX_PATH_BYTES
    check_bind(private.address, None)
    check_connect(private.address, None)
    private.close()
    assert not directory.exists()
    private.close()


def test_every_private_endpoint_is_another() -> None:
    with private_endpoint() as one, private_endpoint() as other:
        assert one.address != other.address


def test_the_directory_goes_also_when_a_socket_was_bound_there(key_file: Keys) -> None:
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
    with pytest.raises(LinkError, match="no private directory"):
        PrivateEndpoint(str(own / "absent"))


def test_a_long_temporary_directory_is_no_obstacle(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = own / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_endpoint() as private:
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


@pytest.mark.parametrize(
    "endpoint",
    ["ipc://relative/socket", "ipc://@abstract", "ipc://*", "ipc://", "ipc:///tmp/", "ipc://a\0b"],
)
def test_an_ipc_endpoint_is_an_absolute_path(endpoint: str) -> None:
    for check in (check_bind, check_connect):
        with pytest.raises(LinkError, match="absolute path"):
            check(endpoint, None)


def test_a_path_over_the_limit_of_unix_sockets_is_refused(own: Path) -> None:
    fitting = f"{own}/".ljust(MAX_PATH_BYTES, "x")
    check_bind(f"ipc://{fitting}", None)
    for check in (check_bind, check_connect):
        with pytest.raises(LinkError, match="107"):
            check(f"ipc://{fitting}x", None)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(own: Path, mode: int) -> None:
    own.chmod(mode)
    for check in (check_bind, check_connect):
        with pytest.raises(LinkError, match="0700"):
            check(f"ipc://{own}/socket", None)
    own.chmod(0o700)


def test_a_server_may_connect_before_the_directory_exists_but_nobody_can_bind(own: Path) -> None:
    check_connect(f"ipc://{own}/later/socket", None)
    with pytest.raises(LinkError, match="No such file"):
        check_bind(f"ipc://{own}/later/socket", None)


def test_a_file_in_the_way_is_not_removed(own: Path) -> None:
    precious = own / "socket"
    precious.write_text("precious")
    with pytest.raises(LinkError, match="no socket"):
        check_bind(f"ipc://{precious}", None)
    assert precious.read_text() == "precious"


def test_a_socket_is_taken_over_only_from_the_dead(own: Path) -> None:
    path = own / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(LinkError, match="another process listens"):
            check_bind(f"ipc://{path}", None)
    assert path.exists()
    check_bind(f"ipc://{path}", None)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:1",
        "tcp://host:99999",
        "tcp://host:port",
        "tcp://a/b:1",
        "tcp://host:1;other:2",
        "http://host:1",
        "inproc://x",
        "",
    ],
)
def test_a_tcp_endpoint_is_a_host_and_a_port(endpoint: str, key_file: Keys) -> None:
    for check in (check_bind, check_connect):
        with pytest.raises(LinkError, match="endpoint is"):
            check(endpoint, key_file)


def test_only_a_sidecar_may_leave_host_or_port_open(key_file: Keys) -> None:
    for endpoint in ("tcp://*:5555", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"):
        check_bind(endpoint, key_file)
        with pytest.raises(LinkError, match="needs a host and a port"):
            check_connect(endpoint, key_file)
    for endpoint in ("tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://gpu-box.example:1"):
        check_bind(endpoint, key_file)
        check_connect(endpoint, key_file)
