"""One server with rejection sampling for the tests of this folder: real models, float32.

With `--thorough` all tests also run on a server that passes as a GPU server does.
"""

from collections.abc import Iterator

import pytest

from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import COMMON, QSPEC, connected, cores, state
from test.preloaded.server import Server


@pytest.fixture(scope="package", params=["normal", pytest.param("gpu", marks=pytest.mark.thorough)])
def server(
    request: pytest.FixtureRequest, models: DemoModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = [
        *COMMON,
        *QSPEC,
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
        *("--speculative-qspec-acceptance", "reject"),
        *("--speculative-qspec-mode", "sequential"),
    ]
    more = GPU_SHAPE if request.param == "gpu" else ""
    environment = awaiting(tmp_path_factory.mktemp("plugin"), more)
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        connected(running)
        yield running
        assert not state(running)["failed"], running.log[-4000:]
