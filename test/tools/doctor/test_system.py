"""The doctor finds too few descriptors, sockets that others can replace, and a taken port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.link import private
from sglang_qspec.tools.doctor import system
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Status, examine
from test.tools.doctor.test_software import in_new_process


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new directory with a short path, the only one for private sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setattr(private, "_parents", lambda: [directory])
        yield Path(directory)


def test_a_low_limit_of_descriptors_is_a_warning() -> None:
    lower = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))\n"
    finding = in_new_process("descriptors", lower)
    assert finding["status"] == "warning"
    assert "only up to 500 file descriptors" in finding["found"]
    assert "ulimit -Hn" in finding["advice"]


def test_private_sockets_work_and_leave_nothing_behind(own: Path) -> None:
    finding = system.sockets(Case())
    assert finding.status is Status.OK
    assert finding.found == f"private sockets work in {own}"
    assert list(own.iterdir()) == []


def test_a_folder_in_which_others_can_replace_sockets_is_a_failure(own: Path) -> None:
    own.chmod(0o777)
    finding = examine("sockets", lambda: system.sockets(Case()))
    assert finding.status is Status.FAILURE
    assert f"chmod go-w {own}" in finding.found


def test_the_folder_of_a_killed_server_is_counted_and_kept(own: Path) -> None:
    script = (
        "import os, sys\n"
        "from sglang_qspec.link import PrivateEndpoint\n"
        "PrivateEndpoint(sys.argv[1])\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(own)])
    left = list(own.iterdir())
    assert len(left) == 1
    assert "removes 1 folder of killed servers" in system.sockets(Case()).found
    assert list(own.iterdir()) == left


def endpoint_of(directory: Path) -> Case:
    return Case(settings=QSpecConfig(endpoint=f"ipc://{directory}/link"))


def test_an_endpoint_in_a_folder_that_others_can_enter_is_a_failure(own: Path) -> None:
    own.chmod(0o755)
    finding = examine("endpoint", lambda: system.endpoint(endpoint_of(own)))
    assert finding.status is Status.FAILURE
    assert f"chmod 0700 {own}" in finding.found


def test_an_endpoint_without_a_sidecar_is_a_warning(own: Path) -> None:
    finding = system.endpoint(endpoint_of(own))
    assert finding.status is Status.WARNING
    assert f"qspec sidecar --endpoint ipc://{own}/link" in finding.advice
    (own / "link").touch()
    assert system.endpoint(endpoint_of(own)).status is Status.OK


def test_each_endpoint_of_a_list_is_checked(own: Path) -> None:
    (own / "link").touch()
    both = Case(settings=QSpecConfig(endpoint=f"ipc://{own}/link,ipc://{own}/other"))
    finding = system.endpoint(both)
    assert finding.status is Status.WARNING
    assert finding.found == f"no sidecar listens at ipc://{own}/other"
    (own / "other").touch()
    assert (
        system.endpoint(both).found
        == f"a server may connect to ipc://{own}/link, ipc://{own}/other"
    )


def test_a_key_file_that_others_can_read_is_a_failure(own: Path) -> None:
    from sglang_qspec.link import keys

    keys.create(own / "key")
    (own / "key").chmod(0o644)
    settings = QSpecConfig(endpoint="tcp://127.0.0.1:5555", key_file=str(own / "key"))
    finding = examine("endpoint", lambda: system.endpoint(Case(settings=settings)))
    assert finding.status is Status.FAILURE
    assert f"chmod 600 {own / 'key'}" in finding.found


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_a_failure_that_names_the_process(host: str) -> None:
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = system.port(Case(port=port))
    assert finding.status is Status.FAILURE
    assert f"process {os.getpid()} " in finding.found
    assert "another port" in finding.advice
    assert system.port(Case(port=port)).status is Status.OK
