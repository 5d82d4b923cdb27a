"""What each attention backend can verify."""

from sglang_qspec.engine.cuda import backends
from sglang_qspec.policy import PassCost


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
