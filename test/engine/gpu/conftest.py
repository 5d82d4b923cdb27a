"""A server that passes as a GPU server does, for the tests of this folder: real models, float32."""

from collections.abc import Iterator

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import server_with_sidecar
from test.engine.contract import Answers, Bodies
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import PLAIN, ask_all
from test.preloaded.server import Server


@pytest.fixture(scope="package")
def server(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, flags = tmp_path_factory.mktemp("plugin"), ("--max-running-requests", "4")
    with server_with_sidecar(models, folder, *flags, more=GPU_SHAPE) as running:
        yield running


@pytest.fixture(scope="package")
def bodies(models: DemoModels) -> Bodies:
    return [{"text": text} for text in render(models.target, PROMPTS[:6])]


@pytest.fixture(scope="package")
def expected(server: Server, bodies: Bodies) -> Answers:
    return ask_all(server, bodies, **PLAIN)
