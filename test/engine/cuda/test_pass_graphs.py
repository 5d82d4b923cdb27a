"""Each pass runs on the right backend and the right graphs; the tests need no model."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.runtime_context import get_context, get_exec, get_parallel, get_spec

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.cuda import backends, capture, pass_graphs, widths
from sglang_qspec.engine.cuda.pass_graphs import PassGraphs
from sglang_qspec.engine.start.algorithm import QSpecAlgorithm

SIZES = [1, 2, 4, 8, 16, 48, 64, 128]
MOST = 100
"""Maximum number of requests that the target runs at once."""


class ModelRunner:
    """The part of SGLang's model runner that `PassGraphs` uses; its backends are only tuples."""

    device = "cuda"
    gpu_id = 0
    prefill_attention_backend_str = decode_attention_backend_str = "fa3"
    model_config = SimpleNamespace(context_len=4096, num_attention_heads=32, head_dim=128)
    req_to_token_pool = SimpleNamespace(size=MOST)
    spec_algorithm: Any = QSpecAlgorithm("QSPEC", lambda _: object)

    def __init__(self, *, captured: bool = True) -> None:
        self.attn_backend: Any = "own"
        self.eager_runner = object()
        self.decode_cuda_graph_runner: Any = runner(self, None, 8) if captured else None
        self.translated: list[Any] = []
        self.kv_index_translator = SimpleNamespace(bind_and_verify_backends=self.translated.extend)

    def _get_attention_backend(self) -> Any:
        spec = get_spec()
        return (spec.speculative_num_draft_tokens, spec.speculative_eagle_topk)

    @property
    def running(self) -> Any:
        """The backend and the width of the graphs on which a pass would run now."""
        made = self.decode_cuda_graph_runner
        return self.attn_backend, None if made is None else made.width


def runner(model_runner: Any, backend: Any, width: int) -> Any:
    """A stand-in for SGLang's runner after the capture of a width."""
    with widths.pruned(width):
        sizes = [size for size in get_exec().graph.cuda_graph_config.decode.bs if size <= MOST]
    return SimpleNamespace(width=width, backend=backend, capture_bs=sizes, max_bs=max(sizes))


@pytest.fixture(autouse=True)
def configuration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server with graphs for 8 draft tokens and 10 GiB of free memory."""
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "static")
    monkeypatch.setattr(pass_graphs, "get_available_gpu_memory", lambda *_, **__: 10.0)
    monkeypatch.setattr(capture, "capture_width", runner)
    decode = PhaseConfig(backend="full", bs=SIZES, max_bs=max(SIZES))
    with (
        get_context().override_server_args(
            cuda_graph_config=CudaGraphConfig(decode=decode),
            speculative_num_draft_tokens=8,
            speculative_eagle_topk=8,
        ),
        get_parallel().override(tp_group=SimpleNamespace(world_size=1)),
    ):
        yield


def captured(model_runner: ModelRunner, **settings: Any) -> PassGraphs:
    made = PassGraphs(model_runner, QSpecConfig(**settings))
    made.capture()
    return made


def test_each_width_has_a_backend_and_graphs_of_its_own() -> None:
    target = ModelRunner()
    made = captured(target)
    assert made.widths(1) == (1, 2, 4, 8)
    expected: dict[int, Any] = {1: (1, 1), 2: (2, 1), 4: (4, 4), 8: "own"}
    for width, backend in expected.items():
        with made.at(width):
            assert target.running == (backend, width)
        assert target.running == ("own", 8)
    assert target.translated == [(1, 1), (2, 1), (4, 4)]
    assert get_spec().speculative_num_draft_tokens == 8


def test_no_backend_of_a_server_that_takes_chains_expects_trees() -> None:
    target = ModelRunner()
    with get_spec().override(speculative_eagle_topk=1):
        assert not backends.is_ragged()
        made = captured(target)
    assert made.widths(1) == (1, 2, 4, 8)
    assert target.translated == [(1, 1), (2, 1), (4, 1)]


def test_a_large_batch_has_only_the_widths_that_are_captured_for_it() -> None:
    made = captured(ModelRunner(), graph_widths="4,6")
    assert made.widths(48) == (1, 4, 6, 8)
    assert made.widths(64) == (1, 4, 6, 8)
    target = ModelRunner()
    target.decode_cuda_graph_runner.max_bs = 48
    assert captured(target).widths(64) == (1, 2, 4)


def test_a_batch_that_is_too_large_for_all_graphs_may_be_as_wide_as_pays() -> None:
    assert captured(ModelRunner()).widths(90) == (1, 2, 4, 8)
    assert captured(ModelRunner()).widths(128) == (1, 2, 4)


def test_a_failed_pass_leaves_the_targets_own_backend() -> None:
    target = ModelRunner()
    made = captured(target)
    with pytest.raises(ZeroDivisionError), made.at(2):
        _ = 1 / 0
    assert target.running == ("own", 8)


def test_widths_without_room_are_left_out_and_plain_passes_come_first(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = captured(ModelRunner(), graph_memory=25)
    assert made.widths(1) == (1, 2, 8)
    assert "No CUDA graphs for width 4: they would take more than 25 MiB" in caplog.text
    assert "eager" not in caplog.text
    caplog.clear()
    monkeypatch.setattr(
        pass_graphs, "get_available_gpu_memory", lambda *_, **__: 0.02
    )  # half is 10 MiB
    target = ModelRunner()
    assert captured(target).widths(1) == (1, 8)
    assert "No CUDA graphs for width 1, 2, 4" in caplog.text
    assert "Passes without drafts are eager" in caplog.text
    with captured(target).at(1):  # a plain pass needs no backend of its own
        assert target.running == ("own", 8)


def test_graphs_of_flashinfer_need_more_room() -> None:
    target = ModelRunner()
    target.prefill_attention_backend_str = target.decode_attention_backend_str = "flashinfer"
    # 10 MiB for each of 8 sizes, and buffers of 2 MiB at width 1 and 4 MiB at width 2.
    captured(target, graph_memory=83)
    assert target.translated == [(1, 1)]


def test_what_was_captured_counts_against_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10.0, 10.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(pass_graphs, "get_available_gpu_memory", lambda *_, **__: next(free))
    assert captured(ModelRunner(), graph_memory=500).widths(1) == (1, 8)


def test_the_start_logs_widths_sizes_seconds_and_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    captured(ModelRunner())
    (line,) = [r.message for r in caplog.records if "CUDA graphs" in r.message]
    assert "width 1 for 7 batch sizes up to 64, width 2" in line
    assert "took 0.0 s and 0 MiB" in line


def test_without_graphs_only_backends_of_one_width_are_multiplied() -> None:
    target = ModelRunner(captured=False)
    made = captured(target)
    assert made.widths(4) == (1, 2, 3, 4, 6, 8)
    assert made.widths(200) == (1, 2, 3)
    for width, backend in ((1, "own"), (3, (3, 3)), (8, "own")):
        with made.at(width):
            assert target.running == (backend, None)
    target.prefill_attention_backend_str = "flashinfer"
    target.decode_cuda_graph_runner = target.eager_runner
    made = captured(target)
    assert made.widths(4) is None
    with made.at(3):
        assert target.attn_backend == "own"


def test_a_ragged_server_captures_plain_passes_beside_its_totals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    target = ModelRunner()
    target.decode_cuda_graph_runner.capture_num_tokens = [8, 16, 64]
    assert captured(target).tiers == ()  # trees: the drafts of this server branch
    with get_spec().override(speculative_eagle_topk=1):
        assert backends.is_ragged()
        made = captured(target)
    assert made.tiers == (8, 16, 64)
    assert made.widths(4) == (1,)
    with made.at(1):
        assert target.running == ((1, 1), 1)
    with made.at(5):
        assert target.running == ("own", 8)


def test_sglang_captures_the_widest_for_batches_of_a_bounded_number_of_rows() -> None:
    stock: Any = SimpleNamespace(spec_algorithm=SimpleNamespace(name="NONE"))
    target: Any = ModelRunner()

    def rows(model_runner: Any) -> int:
        return 8 * max(get_exec().graph.cuda_graph_config.decode.bs)

    assert capture.logits_rows(rows, stock) == 8 * 128
    assert capture.logits_rows(rows, target) == 768
    with get_spec().override(speculative_num_draft_tokens=64):
        assert capture.logits_rows(lambda _: 512, target) == 512
    assert capture.runner_class(lambda _: int, stock) is int
    assert capture.runner_class(lambda _: int, target).__name__ == "TreeGraphs"
