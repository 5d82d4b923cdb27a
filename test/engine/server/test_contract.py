"""The contract of servers, on the server of this folder."""

import pytest

from benchmark.harness.server import Server
from test.engine.contract import Answers, Bodies, ServerContract

pytestmark = pytest.mark.server


class TestContract(ServerContract):
    drafted_share = 1 / 4

    @pytest.fixture
    def plainly_sampled(self, samples: Answers) -> Answers:
        return samples

    def test_sampled_texts_are_as_frequent_as_without_speculation(
        self, server: Server, bodies: Bodies, plainly_sampled: Answers
    ) -> None:
        """Not only with `--thorough`."""
        self.check_frequencies(server, bodies, plainly_sampled)
