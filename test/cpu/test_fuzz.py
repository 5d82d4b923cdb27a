"""Random shapes for the compiled kernels; `scripts/sanitize` runs them with sanitizers."""

import pytest

from sglang_qspec.cpu.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX-512 with VNNI")


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes_give_the_result_of_numpy_or_are_refused(seed: int) -> None:
    from test.cpu.fuzz import KernelFuzz

    KernelFuzz(seed).run(200)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_shapes_give_the_result_of_numpy_or_are_refused(seed: int) -> None:
    from test.cpu.fuzz import KernelFuzz

    KernelFuzz(seed).run(2000)
