"""The endpoints that the tests of the link run over."""

from __future__ import annotations

from collections.abc import Iterator

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
