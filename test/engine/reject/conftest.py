"""One server with rejection sampling for the tests of this folder: real models, float32."""

from collections.abc import Iterator

import pytest

from benchmark.harness.server import Server
from sglang_qspec.models import DemoModels
from test.engine.server.running import COMMON, cores, state, until


@pytest.fixture(scope="package")
def server(models: DemoModels) -> Iterator[Server]:
    arguments = [
        *COMMON,
        *("--speculative-algorithm", "QSPEC"),
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
        *("--speculative-qspec-acceptance", "reject"),
        *("--speculative-qspec-mode", "sequential"),
    ]
    with Server(models.target, arguments, cores=cores(0)) as running:
        until(lambda: state(running)["sidecar"] == "ready", 120)
        yield running
