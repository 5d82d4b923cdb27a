"""A target and a sidecar on one CPU: what the drafts cost the target is measured.

GPUs that both share behave alike, because each slows the other down there too.
"""

from collections.abc import Iterator

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import DemoModels
from test.engine.server.running import COMMON, QSPEC, cores, generate, state, until
from test.preloaded.server import Server

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(models: DemoModels) -> Iterator[Server]:
    """A server that shares one core with its sidecar; both have the same priority."""
    core = cores(0)
    arguments = [
        *COMMON,
        *(*QSPEC, "--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(core[0])),
    ]
    with Server(models.target, arguments, cores=core) as server:
        until(lambda: state(server)["sidecar"] == "ready")
        yield server


def test_the_cost_of_drafts_on_the_targets_cpu_is_measured(
    server: Server, models: DemoModels
) -> None:
    text = render(models.target, PROMPTS[:1])[0]
    plain = generate(server, text, max_new_tokens=96, custom_params={"qspec_enabled": False})

    def measured() -> bool:
        """Whether plain passes have run beside a drafting sidecar and beside an idle one."""
        answer = generate(server, text, max_new_tokens=96)
        assert answer["output_ids"] == plain["output_ids"]
        return state(server)["target_slowdown"] is not None

    until(measured)
