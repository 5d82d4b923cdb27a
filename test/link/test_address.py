"""Endpoints: private directories and allowed addresses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sglang_qspec.errors import LinkError
from sglang_qspec.link import Keys
from sglang_qspec.link.address import MAX_PATH_BYTES, check_bind, check_connect


def refusal(endpoint: str, key_file: Keys | None = None) -> str:
    """What both ends say of an endpoint that neither may use."""
    messages = set()
    for check in (check_bind, check_connect):
        with pytest.raises(LinkError) as refused:
            check(endpoint, key_file)
        messages.add(str(refused.value))
    (message,) = messages
    assert message.startswith(f"the endpoint is {endpoint!r}, but ")
    return message


def allow(endpoint: str, key_file: Keys | None = None) -> None:
    """Fail unless both ends may use the endpoint."""
    check_bind(endpoint, key_file)
    check_connect(endpoint, key_file)


@pytest.mark.parametrize(
    "endpoint",
    ["ipc://relative/socket", "ipc://@abstract", "ipc://*", "ipc://", "ipc:///tmp/", "ipc://a\0b"],
)
def test_an_ipc_endpoint_is_an_absolute_path(endpoint: str) -> None:
    assert "absolute path" in refusal(endpoint)


def test_a_path_over_the_limit_of_unix_sockets_is_refused(own: Path) -> None:
    fitting = f"{own}/".ljust(MAX_PATH_BYTES, "x")
    check_bind(f"ipc://{fitting}", None)
    assert "path has 108 bytes, and a unix socket's path may have at most 107" in refusal(
        f"ipc://{fitting}x"
    )


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o701, 0o710, 0o704, 0o740, 0o770, 0o707, 0o1777])
def test_a_directory_that_others_have_access_to_is_refused(own: Path, mode: int) -> None:
    own.chmod(mode)
    message = refusal(f"ipc://{own}/socket")
    assert f"the mode {mode:04o}" in message
    assert f"chmod 0700 {own}`" in message
    own.chmod(0o700)


def test_a_sticky_directory_of_this_user_alone_is_allowed(own: Path) -> None:
    own.chmod(0o1700)
    allow(f"ipc://{own}/socket")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(own: Path) -> None:
    theirs = own / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, -1)
    message = refusal(f"ipc://{theirs}/socket")
    assert "belongs to user 12345, but must belong to user 0" in message


def test_a_path_that_is_no_directory_is_refused(own: Path) -> None:
    (own / "file").touch(mode=0o600)
    assert "is not a directory" in refusal(f"ipc://{own}/file/socket")


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_replace_is_refused(own: Path, mode: int) -> None:
    shared, mine = own / "shared", own / "shared" / "mine"
    mine.mkdir(parents=True, mode=0o700)
    mine.chmod(0o700)
    shared.chmod(mode)
    assert f"chmod go-w {shared}" in refusal(f"ipc://{mine}/socket")
    # In a sticky directory only its owner can rename it.
    shared.chmod(mode | 0o1000)
    allow(f"ipc://{mine}/socket")


def test_a_symbolic_link_is_followed_to_a_directory_that_must_be_private(own: Path) -> None:
    shared, mine, link = own / "shared", own / "mine", own / "link"
    mine.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    link.symlink_to(mine)
    check_bind(f"ipc://{link}/socket", None)
    # Others can replace a symbolic link in a directory that they can write, at any step.
    (shared / "link").symlink_to(mine)
    (own / "way").symlink_to(shared / "link")
    for path in (shared / "link", own / "way"):
        assert f"chmod go-w {shared}" in refusal(f"ipc://{path}/socket")
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(LinkError, match="symbolic links"):
        check_bind(f"ipc://{link}/socket", None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link away")
def test_a_symbolic_link_of_another_user_is_refused(own: Path) -> None:
    mine, link = own / "mine", own / "link"
    mine.mkdir(mode=0o700)
    link.symlink_to(mine)
    os.lchown(link, 12345, -1)
    assert "a symbolic link of user 12345" in refusal(f"ipc://{link}/socket")


def test_a_server_may_connect_before_the_directory_exists_but_nobody_can_bind(own: Path) -> None:
    check_connect(f"ipc://{own}/later/socket", None)
    check_connect(f"ipc://{own}/much/later/socket", None)
    with pytest.raises(LinkError, match="No such file"):
        check_bind(f"ipc://{own}/later/socket", None)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_server_does_not_wait_for_a_directory_that_others_can_create(
    own: Path, mode: int
) -> None:
    own.chmod(mode)
    with pytest.raises(LinkError, match=f"mkdir -m 0700 {own}/later`"):
        check_connect(f"ipc://{own}/later/socket", None)
    own.chmod(0o700)


def test_a_file_in_the_way_is_not_removed(own: Path) -> None:
    precious = own / "socket"
    precious.write_text("precious")
    with pytest.raises(LinkError, match="not a socket"):
        check_bind(f"ipc://{precious}", None)
    assert precious.read_text() == "precious"


def test_a_socket_is_taken_over_only_from_a_dead_process(own: Path) -> None:
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
    assert refusal(endpoint, key_file)


def test_only_a_sidecar_may_leave_host_or_port_open(key_file: Keys) -> None:
    for endpoint in ("tcp://*:5555", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"):
        check_bind(endpoint, key_file)
        with pytest.raises(LinkError, match="needs a host and a port"):
            check_connect(endpoint, key_file)
    for endpoint in ("tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://gpu-box.example:1"):
        allow(endpoint, key_file)
