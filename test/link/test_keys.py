"""The key file has safe permissions, and no peer connects without it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_qspec.errors import LinkError
from sglang_qspec.link import Keys, LinkState, SidecarLink, keys
from sglang_qspec.messages import PROTOCOL, Hello
from test.link.sockets import dealer, router
from test.link.wire import FINGERPRINT, VOCAB_SIZE, Wire, open_wire, until


def test_a_new_key_file_is_readable_only_by_its_owner_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "qspec.key"
    created = keys.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.load(path) == created
    assert created.sidecar_secret not in repr(created)
    assert created.server_secret not in repr(created)


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "qspec.key"
    first = keys.create(path)
    with pytest.raises(LinkError, match="cannot be written"):
        keys.create(path)
    assert keys.load(path) == first


def owned_by(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """Let all files belong to this user."""
    fstat = os.fstat

    def of_user(descriptor: int) -> os.stat_result:
        fields = list(fstat(descriptor))
        fields[stat.ST_UID] = uid
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", of_user)


@pytest.mark.parametrize(
    ("uid", "mode"),
    [
        *((1000, mode) for mode in (0o640, 0o440, 0o604, 0o620, 0o610, 0o666)),
        *((0, mode) for mode in (0o644, 0o444, 0o660, 0o650, 0o604)),
    ],
)
def test_a_key_file_that_others_can_access_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, mode: int
) -> None:
    path = tmp_path / "qspec.key"
    keys.create(path)
    path.chmod(mode)
    owned_by(monkeypatch, uid)
    with pytest.raises(LinkError, match=f"mode {mode:04o}.*chmod 600.*defaultMode: 0400"):
        keys.load(path)


@pytest.mark.parametrize(("uid", "mode"), [(0, 0o440), (0, 0o400), (0, 0o640), (1000, 0o400)])
def test_a_key_file_that_kubernetes_mounts_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, mode: int
) -> None:
    """Kubernetes links the file to a folder that it replaces as a whole."""
    version = tmp_path / "..2026_01_01_00_00_00.1"
    version.mkdir()
    created = keys.create(version / "qspec.key")
    (version / "qspec.key").chmod(mode)
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "qspec.key").symlink_to("..data/qspec.key")
    owned_by(monkeypatch, uid)
    assert keys.load(tmp_path / "qspec.key") == created


def test_a_file_that_is_no_key_file_is_refused_and_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for content in (b"", b"hunter2", b'{"sidecar_public": "hunter2"}', b"\xff\xfe"):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(LinkError, match="not a key file") as caught:
            keys.load(path)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(LinkError, match="cannot be read"):
        keys.load(tmp_path / "absent")


def test_a_damaged_key_file_is_refused(tmp_path: Path) -> None:
    good = keys.create(tmp_path / "good")
    other = keys.create(tmp_path / "other")
    for index, damage in enumerate(
        (
            {"sidecar_secret": other.sidecar_secret},
            {"server_public": other.server_public},
            {"server_secret": "short"},
            {"server_secret": "é" * 40},
        )
    ):
        path = tmp_path / f"damaged{index}"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(good, **damage)))
        path.chmod(0o600)
        with pytest.raises(LinkError, match="not a pair"):
            keys.load(path)


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
@pytest.mark.parametrize("knows_the_sidecar", [False, True], ids=["stranger", "knows sidecar"])
def test_a_server_with_other_keys_cannot_connect(
    tmp_path: Path,
    key_file: Keys,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    knows_the_sidecar: bool,
) -> None:
    others = keys.create(tmp_path / "other.key")
    if knows_the_sidecar:
        # This peer knows the sidecar's public key but has no key pair that the sidecar admits.
        others = msgspec.structs.replace(others, sidecar_public=key_file.sidecar_public)
    with open_wire(transport, key_file) as wire:
        wire.keys = key_file
        server = wire.serve()
        wire.keys = others
        link = wire.link()
        until(
            lambda: "failed ZMQ handshake" in caplog.text,
            link.receive,
            lambda: server.receive(0),
        )
        assert link.state is LinkState.CONNECTING
        assert server.peers == ()
        assert server.unserved == server.malformed == 0
        wire.keys = key_file
        right = wire.link()
        until(lambda: right.state is LinkState.READY, right.receive, lambda: server.receive(0))


def test_a_server_without_keys_cannot_connect(key_file: Keys) -> None:
    with open_wire("tcp", key_file) as wire:
        server = wire.serve()
        with dealer(None, None) as peer:
            # ZMQ does not try again after this failure, so the monitor must see the first attempt.
            monitor = peer.get_monitor_socket()
            peer.connect(wire.endpoint)
            hello = Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT)
            peer.send(msgspec.msgpack.encode(hello))
            events: list[str] = []
            until(
                lambda: any("HANDSHAKE_FAILED" in event for event in events),
                lambda: server.receive(0),
                lambda: events.extend(names(monitor)),
            )
            monitor.close()
        assert server.peers == ()
        assert server.unserved == server.malformed == 0


def names(monitor: zmq.Socket[bytes]) -> list[str]:
    """The names of the events that a ZMQ monitor has reported."""
    seen = []
    while monitor.poll(0):
        seen.append(zmq.Event(recv_monitor_message(monitor)["event"]).name or "")
    return seen


@pytest.mark.parametrize("impostor_has_keys", [False, True], ids=["plain", "other keys"])
def test_a_link_sends_nothing_to_a_sidecar_without_the_key_file(
    tmp_path: Path, key_file: Keys, caplog: pytest.LogCaptureFixture, impostor_has_keys: bool
) -> None:
    others = keys.create(tmp_path / "other.key") if impostor_has_keys else None
    with router("tcp://127.0.0.1:*", others) as (impostor, endpoint):
        wire = Wire(endpoint, key_file)
        link = wire.link()
        until(lambda: "failed ZMQ handshake" in caplog.text, link.receive)
        assert link.state is LinkState.CONNECTING
        assert not impostor.poll(0)
        wire.close()


def test_tcp_without_keys_is_refused_on_both_ends() -> None:
    wire = Wire("tcp://127.0.0.1:5555")
    with pytest.raises(LinkError, match="needs a key file"):
        SidecarLink(wire.endpoint, Hello(PROTOCOL, VOCAB_SIZE, FINGERPRINT))
    with pytest.raises(LinkError, match="needs a key file"):
        wire.serve()
