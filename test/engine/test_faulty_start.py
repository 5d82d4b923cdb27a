"""An error in a hook at startup disables drafts or metrics, or stops the start."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmark.harness.server import ServerError
from sglang_qspec.engine.boundary.hook import OnError
from sglang_qspec.engine.start import hooks
from sglang_qspec.tools.models import DemoModels
from test.engine.faulty import Faults
from test.engine.server.running import COMMON, cores, generate, state
from test.preloaded.server import Server
from test.random_llama import write_random_llama

pytestmark = pytest.mark.server

STOPPING = [
    row.function.__name__
    for row in (*hooks.front(), *hooks.scheduler())
    if row.on_error is OnError.STOP_START and "lora" not in row.target
]
"""The hooks of every server; those for LoRA run only on servers with adapters."""


@pytest.fixture
def tiny(models: DemoModels, tmp_path: Path) -> Path:
    """A target small enough to load immediately."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    return write_random_llama(tmp_path / "tiny", models, max_position_embeddings=2048, **shape)


def test_errors_while_output_and_metrics_are_set_up_disable_drafts_and_metrics(
    tiny: Path, tmp_path: Path
) -> None:
    faults = Faults(tmp_path)
    once = (
        "fork_scheduler",
        "output_streamer_class",
        "start",
        "repair_detokenizer",
        "repair_scheduler",
    )
    for hook in once:
        faults.arm(hook)
    arguments = [*COMMON, "--speculative-algorithm", "QSPEC", "--enable-metrics"]
    with Server(tiny, arguments, cores=cores(0), environment=faults.environment) as server:
        answer = generate(server, "a b c", ignore_eos=True, max_new_tokens=8)
        assert answer["meta_info"]["completion_tokens"] == 8
        assert "qspec" not in answer["meta_info"]
        assert state(server)["failed"]
        assert "sglang:qspec_" not in server.get("/metrics")
        failure = "Speculation failed while running the hook output_streamer_class on"
        assert server.log.count(failure) == 1
        assert [faults.met(hook) for hook in once] == [1] * len(once)


def test_an_error_in_a_hook_that_answers_depend_on_stops_the_start(
    tiny: Path, tmp_path: Path
) -> None:
    def start(hook: str) -> None:
        folder = tmp_path / hook
        folder.mkdir()
        faults = Faults(folder)
        faults.arm(hook)
        arguments = [*COMMON, "--speculative-algorithm", "QSPEC"]
        with pytest.raises(ServerError, match="ended with code") as error:
            Server(tiny, arguments, environment=faults.environment).__enter__()
        assert "KeyError: 'a fault'" in str(error.value)
        assert faults.met(hook) == 1

    with ThreadPoolExecutor(len(STOPPING)) as pool:
        starts = {hook: pool.submit(start, hook) for hook in STOPPING}
    assert starts
    for hook, started in starts.items():
        assert started.exception() is None, hook
