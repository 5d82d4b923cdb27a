"""All forms of requests, and every pipeline, on the server that passes as a GPU server does."""

from collections.abc import Iterator

import pytest

from benchmark.harness.server import Server
from sglang_qspec.config import MODES
from test.engine.contract import Answers, Bodies
from test.engine.external.test_pipelines import *  # noqa: F403
from test.engine.features.conftest import story  # noqa: F401
from test.engine.features.test_endpoints import *  # noqa: F403
from test.engine.server.running import ask_all, ids, state, turn, turned

pytestmark = pytest.mark.server


@pytest.fixture(scope="package")
def server(as_gpu: Server) -> Server:
    return as_gpu


@pytest.fixture(scope="module", autouse=True)
def _settings(as_gpu: Server) -> Iterator[None]:
    """Restore the settings of the start, which the tests of pipelines change."""
    yield
    turn(as_gpu, mode=MODES.index("auto"), draft_token_num=8, fixed_width=0, step_tokens=16)


def test_no_pass_is_eager_at_any_width(server: Server, bodies: Bodies, expected: Answers) -> None:
    assert server.get("/server_info")["speculative_num_draft_tokens"] == 8
    assert not server.get("/server_info")["disable_overlap_schedule"]
    for width in (1, 2, 4, 8):
        with turned(server, draft_token_num=width):
            assert ids(ask_all(server, bodies[:6])) == ids(expected[:6])
    found = state(server)
    assert found["eager_passes"] == 0
    assert sum(counts["passes"] for counts in found["pipelines"].values()) > 100
