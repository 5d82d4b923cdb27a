"""The endpoints, and their directories, of the tests of the link."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_qspec.link import Keys, keys
from test.link.wire import Wire, open_wire


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return keys.create(tmp_path_factory.mktemp("keys") / "qspec.key")


@pytest.fixture(params=["ipc", "tcp"])
def wire(request: pytest.FixtureRequest, key_file: Keys) -> Iterator[Wire]:
    with open_wire(request.param, key_file) as wire:
        yield wire


@pytest.fixture
def own() -> Iterator[Path]:
    """A directory with a short path that only this user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)
