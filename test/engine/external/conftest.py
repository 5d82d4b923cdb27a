"""One server for the tests of this folder. The tests start its sidecars, all at one endpoint.

With `--thorough` all tests also run on a server and sidecars that pass as those of a GPU do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.harness.dataset import render
from benchmark.prompts import PROMPTS
from sglang_qspec.link import PrivateEndpoint
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.external.sidecars import Sidecars
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import PLAIN, ask_all, connected, cores
from test.preloaded.server import Server


@pytest.fixture(scope="package", params=["normal", pytest.param("gpu", marks=pytest.mark.thorough)])
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Environment variables of the server and its sidecars."""
    more = GPU_SHAPE if request.param == "gpu" else ""
    return awaiting(tmp_path_factory.mktemp("plugin"), more)


@pytest.fixture(scope="package")
def sidecars(models: DemoModels, environment: dict[str, str]) -> Iterator[Sidecars]:
    with PrivateEndpoint() as private:
        sidecars = Sidecars(models, private.address, environment)
        sidecars.start()
        try:
            yield sidecars
        finally:
            sidecars.close()


@pytest.fixture(scope="package")
def server(models: DemoModels, sidecars: Sidecars, environment: dict[str, str]) -> Iterator[Server]:
    arguments = [
        *("--device", "cpu", "--dtype", "float32", "--max-running-requests", "4"),
        *("--max-total-tokens", "16384", "--context-length", "2048", "--log-level", "warning"),
        *("--speculative-algorithm", "QSPEC", "--speculative-num-draft-tokens", "6"),
        *("--speculative-qspec-endpoint", sidecars.endpoint),
        *("--enable-custom-logit-processor", "--sleep-on-idle"),
    ]
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        connected(running)
        yield running


@pytest.fixture(scope="package")
def prompts(models: DemoModels) -> list[str]:
    return render(models.target, PROMPTS)


def bodies_of(prompts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in prompts]


@pytest.fixture(scope="package")
def bodies(prompts: list[str]) -> list[dict[str, Any]]:
    return bodies_of(prompts)


@pytest.fixture(scope="package")
def expected(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    """The answers to all prompts without drafts; the contract's `bodies` are fewer."""
    answers = ask_all(server, bodies_of(prompts), **PLAIN)
    assert not any("qspec" in answer["meta_info"] for answer in answers)
    return answers
