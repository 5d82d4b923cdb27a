"""One running server for all tests of this folder: real target, real sidecar, float32."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import DemoModels
from sglang_qspec.tools.ports import free_port
from test.engine.awaiting import awaiting
from test.engine.frequencies import SAMPLED, SAMPLES, sample
from test.engine.server.running import COMMON, GREEDY, PENALIZED, QSPEC, Plain, connected, cores
from test.preloaded.server import Server


@pytest.fixture(scope="package")
def prompts(models: DemoModels) -> list[str]:
    return render(models.target, PROMPTS)


@pytest.fixture(scope="package")
def bodies(prompts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in prompts]


@pytest.fixture(scope="package")
def starting(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of all tests. It starts while another server answers without speculation."""
    arguments = [
        *COMMON,
        *QSPEC,
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
        "--enable-metrics",
        *("--decode-log-interval", "1"),  # SGLang averages the accept length at its log lines
        *("--grpc-port", str(free_port())),
    ]
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    server = Server(models.target, arguments, cores=cores(0), environment=environment)
    try:
        server.launch()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="package")
def plain(models: DemoModels, prompts: list[str], starting: Server) -> Plain:
    # With overlap SGLang penalizes the output only up to the token before the last.
    arguments = [*COMMON, "--max-running-requests", "8", "--disable-overlap-schedule"]
    with Server(models.target, arguments, cores=cores(0)) as server:
        greedy = server.post("/generate", {"text": prompts, "sampling_params": GREEDY})
        penalized = server.post(
            "/generate", {"text": prompts[: len(PENALIZED)], "sampling_params": PENALIZED}
        )
        samples = sample(server, SAMPLED, {}, SAMPLES)
    return Plain(greedy, penalized, samples)


@pytest.fixture(scope="package")
def samples(plain: Plain) -> list[dict[str, Any]]:
    return plain.samples


@pytest.fixture(scope="package")
def expected(plain: Plain) -> list[dict[str, Any]]:
    return plain.greedy


@pytest.fixture(scope="package")
def server(starting: Server, plain: Plain) -> Server:
    starting.start()
    connected(starting)
    return starting
