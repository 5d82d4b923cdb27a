"""A service with one fast server, for the tests that need no other."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from test.tools.batch.fake_server import FakeServer
from test.tools.batch.fakes import serving
from test.tools.serve_batches.gateway import Gateway
from test.tools.show.conftest import downloads, page

__all__ = ["downloads", "page"]


@pytest.fixture(scope="module")
def fake() -> FakeServer:
    return FakeServer(slots=4, delay=0.002)


@pytest.fixture(scope="module")
def gateway(fake: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(fake) as url:
        found = Gateway(tmp_path_factory.mktemp("service") / "folder", "--url", url)
        found.start()
        try:
            yield found
        finally:
            found.kill()


@pytest.fixture
def client(gateway: Gateway) -> openai.OpenAI:
    return gateway.client()
