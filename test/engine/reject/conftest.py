"""One server with rejection sampling for the tests of this folder: real models, float32.

With `--thorough` all tests also run on a server with SGLang's overlap scheduler.
"""

from collections.abc import Iterator

import pytest

from benchmark.harness.server import Server
from sglang_qspec.models import DemoModels
from test.engine.overlapping import overlapping
from test.engine.server.running import COMMON, QSPEC, cores, state, until


@pytest.fixture(
    scope="package", params=["normal", pytest.param("overlap", marks=pytest.mark.thorough)]
)
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
    overlaps = request.param == "overlap"
    environment = overlapping(tmp_path_factory.mktemp("overlap")) if overlaps else {}
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        until(lambda: state(running)["sidecar"] == "ready", 120)
        yield running
        assert not state(running)["failed"], running.log[-4000:]
