"""One running server for all tests of this folder, with all options that combine.

With `--thorough` all tests also run on a server that passes as a GPU server does.
Each test compares greedy float32 answers with those of the same server without drafts.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.features.asking import PLAIN, ask
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import QSPEC, cores, state, until
from test.preloaded.server import Server

ARGUMENTS = [
    *("--device", "cpu", "--dtype", "float32", "--log-level", "warning"),
    # The KV slots are too few for four answers of 160 tokens: SGLang retracts some requests.
    *("--max-running-requests", "4", "--max-total-tokens", "448", "--context-length", "256"),
    *("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3"),
    *("--enable-priority-scheduling", "--enable-custom-logit-processor"),
    *("--enable-return-hidden-states", "--enable-streaming-session", "--sleep-on-idle"),
]


ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
"""SGLang expects at most 16 more tokens of a request, so it admits more than the slots hold."""


@pytest.fixture(scope="package", params=["normal", pytest.param("gpu", marks=pytest.mark.thorough)])
def server(
    request: pytest.FixtureRequest, models: DemoModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = [
        *ARGUMENTS,
        *QSPEC,
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
    ]
    as_gpu = request.param == "gpu"
    plugin = awaiting(tmp_path_factory.mktemp("plugin"), GPU_SHAPE if as_gpu else "")
    environment = plugin | ENVIRONMENT
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        assert running.get("/server_info")["disable_overlap_schedule"] is not as_gpu
        until(lambda: state(running)["sidecar"] == "ready")
        yield running
        assert not state(running)["failed"], running.log[-4000:]
        assert running.exit_code(1.0) is None, "the server has ended:\n" + running.log[-4000:]


@pytest.fixture(scope="package")
def story(server: Server) -> dict[str, Any]:
    """The target's own answer to TEXT, of 32 tokens."""
    answer: dict[str, Any] = ask(server, {"max_new_tokens": 32, "custom_params": PLAIN})
    return answer
