"""What each attention backend can verify."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_qspec.engine.cuda import backends
from sglang_qspec.errors import ConfigError
from sglang_qspec.policy import PassCost


def takes_chains(backend: str, device: str = "cuda", **model: Any) -> bool:
    view = SimpleNamespace(
        attention_backend=backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_attention_mode="decode",
        device=device,
        model_path="/models/target",
    )
    layers = model.pop("layers", ["full_attention"] * 2)
    defaults: dict[str, Any] = {
        "hf_text_config": SimpleNamespace(layer_types=layers),
        "is_hybrid_swa": False,
        "sliding_window_size": None,
        "context_len": 4096,
        "has_attention_sinks": False,
        "attention_chunk_size": None,
    }
    return backends.takes_chains(view, SimpleNamespace(**defaults | model))


WINDOW: dict[str, Any] = {
    "sliding_window_size": 512,
    "layers": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    "model", [WINDOW, {"has_attention_sinks": True}, {**WINDOW, "is_hybrid_swa": True}]
)
def test_layers_with_windows_or_sinks_are_verified_in_chains_or_refused(
    model: dict[str, Any],
) -> None:
    for backend in ("triton", "fa3", "fa4"):
        assert takes_chains(backend, **model)
    assert not takes_chains("qspec_cpu", "cpu", **model)
    for backend, device, allowed in (
        ("flashinfer", "cuda", "triton, fa3 or fa4"),
        ("unknown", "cuda", "triton, fa3 or fa4"),
        ("intel_amx", "cpu", "qspec_cpu"),
    ):
        with pytest.raises(ConfigError, match=f"is {backend}, which .* use {allowed}"):
            takes_chains(backend, device, **model)


def test_chunks_of_local_attention_are_refused_unless_they_hold_the_context() -> None:
    for backend in ("triton", "fa3", "qspec_cpu"):
        with pytest.raises(ConfigError, match="chunked local .* use --context-length 1024 or less"):
            takes_chains(backend, attention_chunk_size=1024)
        assert not takes_chains(backend, attention_chunk_size=4096)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"sliding_window_size": 512},  # in the config, but in no layer
        {**WINDOW, "sliding_window_size": 4096},  # as long as the context
    ],
)
def test_other_models_keep_their_trees(model: dict[str, Any]) -> None:
    for backend in ("triton", "fa3", "flashinfer", "unknown"):
        assert not takes_chains(backend, **model)


def test_only_backends_with_graphs_for_ragged_lengths_verify_ragged_chains() -> None:
    for backend in ("fa3", "fa4", "trtllm_mha"):
        assert backends.attention_of(backend, 10).ragged
    for backend in ("flashinfer", "triton", "qspec_cpu", "torch_native", "unknown"):
        assert not backends.attention_of(backend, 10).ragged
    assert not backends.attention_of("trtllm_mha", 9).ragged
    assert not backends.attention_of("trtllm_mha", 12).ragged


def test_an_unknown_backend_gets_one_instance_for_each_width() -> None:
    assert not backends.attention_of("unknown").any_width
    assert not backends.attention_of("fa3").any_width
    for backend in ("flashinfer", "triton", "qspec_cpu"):
        assert backends.attention_of(backend).any_width


def test_a_tree_of_two_tokens_is_a_chain() -> None:
    assert [backends.branching(width) for width in (1, 2, 3, 8, 16)] == [1, 1, 3, 8, 10]


def test_before_any_measurement_wide_passes_are_cheap_on_a_gpu_and_not_on_a_cpu() -> None:
    def ratio(cost: PassCost, requests: int) -> float:
        return cost.of(8 * requests) / cost.of(requests)

    gpu, cpu = backends.pass_cost("cuda"), backends.pass_cost("cpu")
    assert cpu == PassCost()
    assert ratio(gpu, 8) < 1.05
    assert 1.7 < ratio(gpu, 64) < 2.1
    assert ratio(cpu, 64) > 5
