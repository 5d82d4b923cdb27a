"""Endpoints that are added or removed while a server runs are checked like those of its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.sidecar import endpoints
from sglang_qspec.errors import RequestError
from sglang_qspec.policy import runtime_settings
from sglang_qspec.values import MAX_ENDPOINTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def settings(folder: Path) -> QSpecConfig:
    return QSpecConfig(endpoint=f"ipc://{folder}/a")


def name(address: object) -> str:
    return f"{endpoints.PREFIX}{address}"


@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_an_address_with_a_0_or_1_is_allowed(
    settings: QSpecConfig, folder: Path, value: float
) -> None:
    given = {name(f"ipc://{folder}/b"): value, "qspec_enabled": 1, "pp_max_micro_batch_size": 8}
    endpoints.check(given, settings)
    runtime_settings.check(given, settings, 8)


@pytest.mark.parametrize("value", [2, -1, 0.5, float("nan")])
def test_another_value_is_refused(settings: QSpecConfig, folder: Path, value: float) -> None:
    with pytest.raises(RequestError, match=rf"ipc://.*/b is {value}, but must be 1 .* or 0"):
        endpoints.check({name(f"ipc://{folder}/b"): value}, settings)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "one address"),
        ("nowhere", "it must have ipc://PATH or tcp://HOST:PORT"),
        ("ipc://b", "must be ipc:// and an absolute path"),
        ("ipc:///a,ipc:///b", "one address"),
        (" ipc:///a", "one address without spaces"),
        ("ipc://" + "/a" * 60, "its path has 120 bytes"),
        ("tcp://host:5555", "tcp endpoint needs a key file"),
        ("tcp://host", "must be ipc://PATH or tcp://HOST:PORT"),
    ],
)
def test_a_wrong_address_is_named(settings: QSpecConfig, address: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        endpoints.check({name(address): 1}, settings)


def test_a_folder_that_others_can_enter_is_named(settings: QSpecConfig, folder: Path) -> None:
    (folder / "open").mkdir(mode=0o755)
    with pytest.raises(RequestError, match=f"cannot be set: .*{folder}/open"):
        endpoints.check({name(f"ipc://{folder}/open/b"): 1}, settings)


def test_a_sidecar_is_removed_whatever_became_of_its_folder_or_the_key_file(
    settings: QSpecConfig, folder: Path
) -> None:
    folder.chmod(0o755)
    endpoints.check({name(f"ipc://{folder}/a"): 0}, settings)
    tcp = QSpecConfig(endpoint="tcp://host:5555", key_file=str(folder / "absent"))
    endpoints.check({name("tcp://host:5555"): 0}, tcp)
    with pytest.raises(RequestError, match="absent' cannot be read"):
        endpoints.check({name("tcp://host:5555"): 1}, tcp)


def test_a_server_with_its_own_sidecar_takes_no_endpoint(folder: Path) -> None:
    with pytest.raises(RequestError, match="started without --speculative-qspec-endpoint"):
        endpoints.check({name(f"ipc://{folder}/b"): 1}, QSpecConfig())


def test_endpoints_are_added_at_the_end_and_removed_by_name() -> None:
    found = endpoints.changed(("ipc:///a", "ipc:///b"), name("ipc:///c"), 1)
    assert found == ("ipc:///a", "ipc:///b", "ipc:///c")
    assert endpoints.changed(found, name("ipc:///a"), 1) == found
    assert endpoints.changed(found, name("ipc:///a"), 0) == ("ipc:///b", "ipc:///c")
    assert endpoints.changed(("ipc:///a",), name("ipc:///a"), 0) == ()


def test_an_unknown_endpoint_cannot_be_removed() -> None:
    with pytest.raises(RequestError, match="cannot be removed: the endpoints are ipc:///a"):
        endpoints.changed(("ipc:///a",), name("ipc:///b"), 0)


def test_there_are_at_most_so_many_endpoints() -> None:
    full = tuple(f"ipc:///{number}" for number in range(MAX_ENDPOINTS))
    assert endpoints.changed(full, name(full[3]), 1) == full
    with pytest.raises(RequestError, match=f"at most {MAX_ENDPOINTS} endpoints"):
        endpoints.changed(full, name("ipc:///more"), 1)
