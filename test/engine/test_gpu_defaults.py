"""SGLang's own resolution of the arguments, on mocked GPUs of four generations."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sglang_qspec import config
from sglang_qspec.config import variable
from sglang_qspec.engine.boundary import refusal
from sglang_qspec.engine.cuda import backends
from sglang_qspec.engine.placement import claims, devices, environment
from sglang_qspec.engine.placement.devices import Gpu
from sglang_qspec.engine.placement.environment import Placement
from sglang_qspec.errors import ConfigError
from sglang_qspec.sidecar.loading import DraftModelOptions, server_args
from sglang_qspec.sidecar.memory import GIB
from sglang_qspec.tools.models import DemoModels

GENERATIONS: dict[int, dict[str, bool]] = {
    80: {},
    89: {},
    90: {"is_hopper_with_cuda_12_3": True, "is_sm90": True},
    100: {"is_sm100": True, "is_blackwell": True, "is_sm100_or_sm110": True},
}
"""SGLang's facts about a platform by compute capability; those not named are false."""


@contextmanager
def cuda(sm: int = 90, gpus: int = 1) -> Iterator[None]:
    """A machine with GPUs of 80 GiB and compute capability `sm`, for SGLang and for us."""
    facts: dict[str, Any] = dict.fromkeys({name for each in GENERATIONS.values() for name in each})
    facts = {name: bool(value) for name, value in facts.items()} | GENERATIONS[sm]
    capability = divmod(sm, 10)
    with ExitStack() as stack:
        stack.enter_context(
            override_platform(
                is_cuda=True,
                has_flashinfer=True,
                device_sm=sm,
                device_capability=capability,
                **facts,
            )
        )
        found = [Gpu(index, f"GPU-{index}", 80 * GIB, 0) for index in range(gpus)]
        for target, value in (
            ("torch.cuda.is_available", True),
            ("torch.cuda.device_count", gpus),
            ("torch.cuda.get_device_capability", capability),
            ("sglang.srt.arg_groups.memory_hook.get_device_memory_capacity", 80 * 1024),
        ):
            stack.enter_context(mock.patch(target, return_value=value))
        stack.enter_context(mock.patch.object(devices, "visible_gpus", return_value=found))
        stack.enter_context(mock.patch.object(claims.OF_PROCESS, "claim", return_value=True))
        yield


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    load_plugins()


@pytest.fixture(autouse=True)
def no_placement() -> Iterator[None]:
    yield
    environment.write(None)


def resolved(args: ServerArgs) -> Any:
    args.resolve_once()
    return resolving_view(args)


def arguments_of(models: DemoModels, **changes: Any) -> ServerArgs:
    """The arguments of a server with QSPEC and the demo models."""
    return ServerArgs(
        **{
            "model_path": str(models.target),
            "device": "cuda",
            "speculative_algorithm": "QSPEC",
            "speculative_draft_model_path": str(models.target),
            **changes,
        }
    )


def server(models: DemoModels, **changes: Any) -> Any:
    """The same arguments, resolved."""
    return resolved(arguments_of(models, **changes))


@pytest.mark.parametrize(("sm", "backend"), [(80, "flashinfer"), (89, "flashinfer"), (90, "fa3")])
def test_before_blackwell_sglangs_default_backend_reads_pages_of_one_token(
    models: DemoModels, sm: int, backend: str
) -> None:
    with cuda(sm):
        options = DraftModelOptions(str(models.target), device="cuda")
        for view in (server(models), resolved(server_args(options))):
            assert (view.attention_backend, view.page_size) == (backend, 1)


def test_on_blackwell_server_and_sidecar_have_a_backend_for_pages_of_one_token(
    models: DemoModels,
) -> None:
    options = DraftModelOptions(str(models.target), device="cuda")
    with cuda(100):
        for view in (server(models), resolved(server_args(options))):
            assert (view.attention_backend, view.page_size) == ("flashinfer", 1)
        plain = resolved(ServerArgs(model_path=str(models.target), device="cuda", page_size=1))
        assert (plain.attention_backend, plain.page_size) == ("trtllm_mha", 64)


@pytest.mark.parametrize(
    ("sm", "given", "backend", "ragged"),
    [
        (80, None, "flashinfer", False),
        (80, "triton", "triton", False),
        (80, "fa3", "fa3", True),
        (89, None, "flashinfer", False),
        (89, "triton", "triton", False),
        (90, None, "fa3", True),
        (90, "fa4", "fa4", True),
        (90, "triton", "triton", False),
        (90, "flashinfer", "flashinfer", False),
        (100, None, "flashinfer", False),
        (100, "triton", "triton", False),
    ],
)
def test_each_backend_verifies_ragged_chains_or_trees_of_one_width(
    models: DemoModels, sm: int, given: str | None, backend: str, ragged: bool
) -> None:
    with cuda(sm):
        view = server(models, attention_backend=given)
        assert backends.verify_backend(view) == backend
        assert not backends.chooses_ragged(view, "auto")
        assert not backends.chooses_ragged(view, "tree")
        if ragged:
            assert backends.chooses_ragged(view, "ragged")
        else:
            with pytest.raises(
                ConfigError, match=f"is 'ragged', but the attention backend {backend}"
            ):
                backends.chooses_ragged(view, "ragged")


def test_graphs_that_pad_no_batch_verify_trees(models: DemoModels) -> None:
    with cuda(90):
        view = server(models, disable_cuda_graph_padding=True)
        assert not backends.chooses_ragged(view, "auto")
        with pytest.raises(ConfigError, match="use tree"):
            backends.chooses_ragged(view, "ragged")


def test_backends_that_need_large_pages_are_refused(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal, "_on_command_line", False)
    with cuda(100):
        for backend, size in (("trtllm_mha", 64), ("fa4", 128)):
            with pytest.raises(ConfigError, match=f"--page-size is {size}, but QSPEC supports"):
                server(models, attention_backend=backend)


def test_a_backend_that_ignores_masks_is_refused_for_trees(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal, "_on_command_line", False)
    with cuda(100):
        view = server(models)
        monkeypatch.setattr(backends, "verify_backend", lambda _: "trtllm_mha")
        assert backends.chooses_ragged(view, "auto")
        with pytest.raises(ConfigError, match="trtllm_mha, which ignores the masks"):
            backends.chooses_ragged(view, "tree")


@pytest.mark.parametrize(("sm", "topk"), [(80, None), (90, 1)])
def test_the_setting_decides_on_ragged_chains_where_the_backend_has_graphs_for_them(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch, sm: int, topk: int | None
) -> None:
    monkeypatch.setattr(refusal, "_on_command_line", False)
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "static")
    monkeypatch.setenv(variable("verify"), "ragged")
    with cuda(sm):
        if topk is None:
            with pytest.raises(ConfigError, match="is 'ragged', but the attention backend flash"):
                server(models)
            return
        assert server(models).speculative_eagle_topk == topk
    assert os.environ["SGLANG_RAGGED_VERIFY_MODE"] == "compact"


def test_the_mode_of_verification_reaches_sglangs_processes(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with cuda(90):
        assert server(models).speculative_eagle_topk == 8
        assert os.environ["SGLANG_RAGGED_VERIFY_MODE"] == "static"
        args = arguments_of(models, speculative_num_draft_tokens=16)
        backends.prepare(args, ragged=False)
        assert args.speculative_eagle_topk == 10
        backends.prepare(args, ragged=True)
        assert args.speculative_eagle_topk == 1
        assert os.environ["SGLANG_RAGGED_VERIFY_MODE"] == "compact"


def test_a_given_attention_backend_of_the_sidecar_wins(models: DemoModels) -> None:
    options = DraftModelOptions(str(models.target), device="cuda", attention_backend="triton")
    with cuda(100):
        assert resolved(server_args(options)).attention_backend == "triton"


def test_the_sidecar_captures_graphs_only_for_passes_that_it_runs(models: DemoModels) -> None:
    for prefill_tokens, most in ((None, 2048), (512, 512)):
        options = DraftModelOptions(
            str(models.target), device="cuda", batch=32, prefill_tokens=prefill_tokens
        )
        with cuda():
            graphs = resolved(server_args(options)).cuda_graph_config
        assert (graphs.prefill.bs[-1], graphs.decode.bs[-1]) == (most, 32)


def test_on_one_gpu_the_targets_fraction_falls_by_the_sidecars(models: DemoModels) -> None:
    with cuda():
        without = server(models, speculative_draft_model_path=None).mem_fraction_static
        assert environment.read() is None
        shared = server(models).mem_fraction_static
    assert 0.15 <= without - shared <= 0.155
    assert environment.read() == Placement("cuda:0", True, 0.15)


def test_on_two_gpus_the_target_keeps_its_fraction(models: DemoModels) -> None:
    with cuda(gpus=2):
        without = server(models, speculative_draft_model_path=None).mem_fraction_static
        assert server(models).mem_fraction_static == without
        assert environment.read() == Placement("cuda:1")
        assert server(models, base_gpu_id=1).mem_fraction_static == without
        assert environment.read() == Placement("cuda:0")


def test_a_given_fraction_of_the_target_is_kept_or_refused(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal, "_on_command_line", False)
    with cuda():
        assert server(models, mem_fraction_static=0.6).mem_fraction_static == 0.6
        with pytest.raises(ConfigError, match=r"--mem-fraction-static is 0\.9"):
            server(models, mem_fraction_static=0.9)


def test_the_reserve_also_covers_a_kv_that_sglang_sizes_after_capture(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    with cuda():
        without = server(models, speculative_draft_model_path=None).mem_fraction_static
        assert 0.15 <= without - server(models).mem_fraction_static <= 0.155


def test_a_server_with_another_algorithm_has_no_placement_and_keeps_its_fraction(
    models: DemoModels,
) -> None:
    environment.write(Placement("cuda:7"))
    with cuda():
        stock = server(models, speculative_algorithm=None, speculative_draft_model_path=None)
        qspec = server(models, speculative_draft_model_path=None)
    assert environment.read() is None
    assert stock.cuda_graph_config.decode.max_bs == qspec.cuda_graph_config.decode.max_bs


@pytest.mark.parametrize("width", [None, 64])
def test_a_gpu_runs_as_many_requests_as_without_qspec_at_any_width(
    models: DemoModels, width: int | None
) -> None:
    with cuda():
        view = server(models, speculative_num_draft_tokens=width)
        assert (view.max_running_requests, view.cuda_graph_config.decode.bs[-1]) == (None, 256)
        assert server(models, max_running_requests=200).max_running_requests == 200


def test_a_cpu_runs_48_requests_unless_told_otherwise(models: DemoModels) -> None:
    assert server(models, device="cpu").max_running_requests == 48
    assert server(models, device="cpu", max_running_requests=200).max_running_requests == 200


def test_sglangs_overlap_scheduler_stays_on_unless_the_pipeline_is_halves(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda():
        assert not server(models).disable_overlap_schedule
        assert server(models, disable_overlap_schedule=True).disable_overlap_schedule
        monkeypatch.setenv(config.variable("mode"), "halves")
        assert server(models).disable_overlap_schedule
    monkeypatch.delenv(config.variable("mode"))
    assert server(models, device="cpu").disable_overlap_schedule
