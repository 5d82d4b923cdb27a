"""A server that passes as a GPU server does, for the tests of this folder: real models, float32."""

from collections.abc import Iterator

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.contract import Answers, Bodies
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import COMMON, PLAIN, QSPEC, ask_all, connected, cores, state
from test.preloaded.server import Server


@pytest.fixture(scope="package")
def server(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = [
        *COMMON,
        *QSPEC,
        *("--max-running-requests", "4"),
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
    ]
    environment = awaiting(tmp_path_factory.mktemp("plugin"), GPU_SHAPE)
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        connected(running)
        yield running
        assert not state(running)["failed"], running.log[-4000:]


@pytest.fixture(scope="package")
def bodies(models: DemoModels) -> Bodies:
    return [{"text": text} for text in render(models.target, PROMPTS[:6])]


@pytest.fixture(scope="package")
def expected(server: Server, bodies: Bodies) -> Answers:
    return ask_all(server, bodies, **PLAIN)
