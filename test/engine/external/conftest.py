"""One server for the tests of this folder. The tests start its sidecars, all at one endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.link import PrivateEndpoint
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.external.load import PLAINLY, SLOTS
from test.engine.external.sidecars import Sidecars
from test.engine.server.running import cores, state, until
from test.preloaded.server import Server


@pytest.fixture(scope="package")
def sidecars(models: DemoModels) -> Iterator[Sidecars]:
    with PrivateEndpoint() as private:
        sidecars = Sidecars(models, private.address)
        sidecars.start()
        try:
            yield sidecars
        finally:
            sidecars.close()


@pytest.fixture(scope="package")
def server(
    models: DemoModels, sidecars: Sidecars, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = [
        *("--device", "cpu", "--dtype", "float32", "--max-running-requests", str(SLOTS)),
        *("--max-total-tokens", "16384", "--context-length", "2048", "--log-level", "warning"),
        *("--speculative-algorithm", "QSPEC", "--speculative-num-draft-tokens", "6"),
        *("--speculative-qspec-endpoint", sidecars.endpoint),
        "--enable-custom-logit-processor",
    ]
    environment = awaiting(tmp_path_factory.mktemp("plugin"))
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        until(lambda: state(running)["sidecar"] == "ready")
        yield running


@pytest.fixture(scope="package")
def prompts(models: DemoModels) -> list[str]:
    return render(models.target, PROMPTS)


@pytest.fixture(scope="package")
def few(prompts: list[str]) -> list[str]:
    """The prompts of `loaded`."""
    return prompts[:8]


@pytest.fixture(scope="package")
def plain(server: Server, few: list[str]) -> list[list[int]]:
    """Output ids of plain decoding, with all prompts of `few` in one call."""
    answers = server.post("/generate", {"text": few, "sampling_params": PLAINLY})
    assert not any("qspec" in answer["meta_info"] for answer in answers)
    return [answer["output_ids"] for answer in answers]
