"""Which passes the attention backend of a device can run, and which are the default."""

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.cuda import backends
from sglang_qspec.engine.passes.launch.tree_attention import Verification, verification_of
from sglang_qspec.errors import ConfigError


@pytest.mark.parametrize("verify", ["auto", "ragged"])
def test_passes_on_our_cpu_backend_are_ragged_and_can_change(verify: str) -> None:
    found = verification_of(QSpecConfig(verify=verify), "cpu", "qspec_cpu")
    assert found == Verification(ragged=True, can_change=True, chains=False)
    assert found.allowed == (0, 1)


def test_a_server_that_is_set_to_trees_of_one_width_keeps_to_them() -> None:
    found = verification_of(QSpecConfig(verify="tree"), "cpu", "qspec_cpu")
    assert found == Verification(ragged=False, can_change=False, chains=False)
    assert found.allowed == (0, 0)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "torch_native"), ("cpu", None)],
)
def test_other_backends_of_a_cpu_verify_one_width_and_refuse_ragged_passes(
    device: str, backend: str | None
) -> None:
    for verify in ("auto", "tree"):
        found = verification_of(QSpecConfig(verify=verify), device, backend)
        assert found == Verification(False, can_change=False, chains=False)
        assert found.allowed == (0, 0)
    with pytest.raises(ConfigError, match=r"--speculative-qspec-verify is 'ragged', but"):
        verification_of(QSpecConfig(verify="ragged"), device, backend)


@pytest.mark.parametrize(("ragged", "chains"), [(True, True), (False, True), (False, False)])
def test_on_a_gpu_the_start_has_decided(
    ragged: bool, chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "is_ragged", lambda: ragged)
    monkeypatch.setattr(backends, "are_chains", lambda: chains)
    found = verification_of(QSpecConfig(), "cuda:1", "fa3")
    assert found == Verification(ragged, can_change=False, chains=chains)
    assert found.allowed == (ragged, ragged)
