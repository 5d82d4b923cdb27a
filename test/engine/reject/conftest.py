"""One server with rejection sampling for the tests of this folder: real models, float32.

With `--thorough` all tests also run on a server that passes as a GPU server does.
"""

from collections.abc import Iterator

import pytest

from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import server_with_sidecar
from test.engine.gpu_shape import GPU_SHAPE
from test.preloaded.server import Server


@pytest.fixture(scope="package", params=["normal", pytest.param("gpu", marks=pytest.mark.thorough)])
def server(
    request: pytest.FixtureRequest, models: DemoModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("plugin")
    flags = (
        *("--speculative-qspec-acceptance", "reject", "--speculative-qspec-mode", "sequential"),
        *("--max-running-requests", "4"),  # samples take half the time
    )
    more = GPU_SHAPE if request.param == "gpu" else ""
    with server_with_sidecar(models, folder, *flags, more=more) as running:
        yield running
