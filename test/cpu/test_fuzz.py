"""Random shapes for the compiled kernels; `scripts/sanitize` runs them with sanitizers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_qspec.cpu.native import native
from test.cpu.fuzz import KernelFuzz
from test.fuzz.examples import examples

pytestmark = pytest.mark.skipif(native() is None, reason="no AVX2")


@pytest.mark.timeout(3600)
@examples(8)
@given(st.integers(0, (1 << 32) - 1))
def test_random_shapes_give_the_result_of_numpy_or_are_refused(seed: int) -> None:
    KernelFuzz(native(), seed).run(1)
