"""LoRA in SGLang's own resolution of the arguments, on a CPU and on mocked GPUs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_qspec import config
from sglang_qspec.config import variable
from sglang_qspec.engine.boundary import refusal
from sglang_qspec.engine.cpu.lora import GPU_DEFAULT
from sglang_qspec.engine.placement import environment
from sglang_qspec.engine.start import lora
from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.models import DemoModels
from test.engine.test_gpu_defaults import arguments_of, cuda, server

LORA: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "lm_head"],
}
ALONE = {"speculative_draft_model_path": None}


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    load_plugins()


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Errors as exceptions, and no setting left for other tests."""
    monkeypatch.setattr(refusal, "_on_command_line", False)
    monkeypatch.setenv(variable("verify"), "auto")
    yield
    environment.write(None)


@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("given", [LORA, {"lora_paths": ["name=/adapters/one"]}])
def test_a_gpu_server_with_adapters_captures_no_decode_graphs_and_verifies_one_width(
    models: DemoModels, sm: int, given: dict[str, Any]
) -> None:
    with cuda(sm):
        plain, view = server(models, **ALONE), server(models, **ALONE, **given)
    assert plain.cuda_graph_config.decode.backend != Backend.DISABLED
    assert view.cuda_graph_config.decode.backend == Backend.DISABLED
    assert view.cuda_graph_config.prefill.backend == plain.cuda_graph_config.prefill.backend
    assert config.from_environment().verify == "tree"
    assert view.speculative_eagle_topk > 1


def test_without_adapters_or_qspec_the_decode_graphs_stay(models: DemoModels) -> None:
    with cuda():
        for changes in ({}, {**LORA, "speculative_algorithm": None}):
            view = server(models, **ALONE, **changes)
            assert view.cuda_graph_config.decode.backend != Backend.DISABLED
    assert config.from_environment().verify == "auto"


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_backend_decode": "full"},
        {"cuda_graph_config": {"decode": {"backend": "full"}}},
    ],
)
def test_decode_graphs_that_are_asked_for_are_refused(
    models: DemoModels, given: dict[str, Any]
) -> None:
    with cuda(), pytest.raises(ConfigError, match="must be 'disabled' with --enable-lora"):
        server(models, **ALONE, **LORA, **given)


def test_ragged_passes_of_a_gpu_are_refused(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("verify"), "ragged")
    with cuda(), pytest.raises(ConfigError, match="verify is 'ragged', but .* with --enable-lora"):
        server(models, **ALONE, **LORA)


def test_sglangs_plan_stream_is_refused(
    models: DemoModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    with cuda(), pytest.raises(ConfigError, match="SGLANG_ENABLE_OVERLAP_PLAN_STREAM is true"):
        server(models, **ALONE, **LORA)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drafts_in_prefills_are_refused(
    models: DemoModels, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("prefill_drafts"), "on")
    with cuda(), pytest.raises(ConfigError, match="'on', but must be 'off' with --enable-lora"):
        server(models, device=device, **ALONE, **LORA)


def test_several_ranks_have_adapters(models: DemoModels) -> None:
    with cuda(gpus=2):
        view = server(models, **ALONE, **LORA, tp_size=2)
    assert (view.tp_size, view.speculative_algorithm) == (2, "QSPEC")
    assert view.cuda_graph_config.decode.backend == Backend.DISABLED


def on_cpu(models: DemoModels, **changes: Any) -> Any:
    args = arguments_of(models, device="cpu", **ALONE, **changes)
    args.resolve_once()
    return resolving_view(args)


def test_a_cpu_server_gets_the_backend_that_runs_there(models: DemoModels) -> None:
    assert on_cpu(models, **LORA).lora_backend == lora.CPU_BACKEND
    assert on_cpu(models, **LORA, lora_backend=lora.CPU_BACKEND).lora_backend == lora.CPU_BACKEND
    assert ServerArgs(model_path=str(models.target)).lora_backend == GPU_DEFAULT


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_backend": "triton"}, "--lora-backend is triton, but must be torch_native"),
        ({"enable_lora_overlap_loading": True}, "--enable-lora-overlap-loading is True"),
    ],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(
    models: DemoModels, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        on_cpu(models, **LORA, **given)


@pytest.mark.parametrize(("algorithm", "asked"), [("QSPEC", False), ("EAGLE", True)])
def test_sglangs_list_of_algorithms_decides_only_about_others(
    algorithm: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "resolving_view", lambda args: args)
    calls: list[Any] = []
    lora.allow(calls.append, SimpleNamespace(speculative_algorithm=algorithm))
    assert bool(calls) == asked


def test_sglangs_own_checks_of_adapters_pass(models: DemoModels) -> None:
    from sglang.srt.arg_groups.lora_hook import check_lora_server_args

    args = arguments_of(models, device="cpu", **ALONE, **LORA)
    args.resolve_once()
    check_lora_server_args(args)
