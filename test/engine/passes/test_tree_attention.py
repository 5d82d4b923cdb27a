"""Which passes the attention backend of a device can run, and which are the default."""

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.passes.tree_attention import verification_of
from sglang_qspec.errors import ConfigError


@pytest.mark.parametrize(("verify", "ragged"), [("auto", True), ("tree", False), ("ragged", True)])
def test_passes_on_our_cpu_backend_are_ragged_unless_the_setting_says_tree(
    verify: str, ragged: bool
) -> None:
    found = verification_of(QSpecConfig(verify=verify), "cpu", "qspec_cpu")
    assert (found.can_be_ragged, found.ragged, found.chains) == (True, ragged, False)


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "torch_native"), ("cpu", None), ("cuda", "fa3"), ("cuda:1", "qspec_cpu")],
)
def test_other_backends_verify_one_width_and_refuse_ragged_passes(
    device: str, backend: str | None
) -> None:
    for verify in ("auto", "tree"):
        found = verification_of(QSpecConfig(verify=verify), device, backend)
        assert (found.can_be_ragged, found.ragged) == (False, False)
    with pytest.raises(ConfigError, match=r"--speculative-qspec-verify is 'ragged', but"):
        verification_of(QSpecConfig(verify="ragged"), device, backend)
