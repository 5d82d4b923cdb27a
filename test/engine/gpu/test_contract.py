"""The contract of servers, on one that passes as a GPU server does."""

import pytest

from benchmark.harness.server import Server
from test.engine.contract import Answers, Bodies, ServerContract
from test.engine.server.running import ask_all, ids, state, turned

pytestmark = pytest.mark.server


class TestContract(ServerContract):
    def test_sampled_texts_are_as_frequent_as_without_speculation(
        self, server: Server, bodies: Bodies, plainly_sampled: Answers
    ) -> None:
        """Not only with `--thorough`."""
        self.check_frequencies(server, bodies, plainly_sampled)


def test_no_pass_is_eager_at_any_width(server: Server, bodies: Bodies, expected: Answers) -> None:
    assert server.get("/server_info")["speculative_num_draft_tokens"] == 8
    assert not server.get("/server_info")["disable_overlap_schedule"]
    for width in (1, 2, 4, 8):
        with turned(server, draft_token_num=width):
            assert ids(ask_all(server, bodies)) == ids(expected)
    found = state(server)
    assert found["eager_passes"] == 0
    assert sum(counts["passes"] for counts in found["pipelines"].values()) > 100
