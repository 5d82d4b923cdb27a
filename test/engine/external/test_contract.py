"""The contract of servers, with a sidecar that the tests start."""

from __future__ import annotations

from signal import Signals

import pytest

from benchmark.harness.server import Server
from test.engine.contract import Answers, Bodies, ServerContract
from test.engine.external.sidecars import Sidecars
from test.engine.frequencies import PARAMETERS
from test.engine.server.running import state, until

pytestmark = pytest.mark.server


class Replaced:
    """The sidecar at the endpoint of the server; a test starts another one when it has ended."""

    def __init__(self, server: Server, sidecars: Sidecars) -> None:
        self._server = server
        self._sidecars = sidecars

    def signal(self, number: Signals) -> None:
        self._sidecars.signal(number)

    def kill(self) -> None:
        self._sidecars.kill()
        until(lambda: state(self._server)["sidecar"] == "lost")
        self._sidecars.start()


class TestContract(ServerContract):
    sampled = PARAMETERS["top-k, presence"]
    samples = 150

    @pytest.fixture
    def bodies(self, bodies: Bodies) -> Bodies:
        return bodies[:6]

    @pytest.fixture
    def sidecar(self, server: Server, sidecars: Sidecars) -> Replaced:
        return Replaced(server, sidecars)

    def test_sampled_texts_are_as_frequent_as_without_speculation(
        self, server: Server, bodies: Bodies, plainly_sampled: Answers
    ) -> None:
        """Not only with `--thorough`."""
        self.check_frequencies(server, bodies, plainly_sampled)
