"""The contract of servers, with rejection sampling. Requests with a seed are matched."""

import pytest

from benchmark.harness.dataset import render
from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import DemoModels
from test.engine.contract import Answers, Bodies, ServerContract
from test.engine.reject.test_rejection import STEPS
from test.engine.server.running import PLAIN, ask_all, turned

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def bodies(models: DemoModels) -> Bodies:
    return [{"text": text, "sampling_params": STEPS} for text in render(models.target, PROMPTS[:6])]


@pytest.fixture(scope="module")
def expected(server: Server, bodies: Bodies) -> Answers:
    return ask_all(server, bodies, **PLAIN)


class TestContract(ServerContract):
    def test_sampled_texts_are_as_frequent_as_without_speculation(
        self, server: Server, bodies: Bodies, plainly_sampled: Answers
    ) -> None:
        """Not only with `--thorough`."""
        with turned(server, fixed_width=1):
            self.check_frequencies(server, bodies, plainly_sampled)
