import pytest

from sglang_qspec.errors import DraftModelError
from sglang_qspec.sidecar.memory import GIB, RUNTIME_BYTES, kv_bytes


def test_kv_gets_what_weights_and_working_memory_leave_of_the_fraction() -> None:
    left = kv_bytes(80 * GIB, 0.25, 6 * GIB, RUNTIME_BYTES)
    assert left == 20 * GIB - 6 * GIB - RUNTIME_BYTES


def test_too_small_a_fraction_is_refused_with_the_numbers_and_the_smallest_that_works() -> None:
    with pytest.raises(DraftModelError, match=r"0\.05 of the device's 80\.0 GiB.*6\.0 GiB of wei"):
        kv_bytes(80 * GIB, 0.05, 6 * GIB, RUNTIME_BYTES)
    with pytest.raises(DraftModelError, match=r"more than 0\.11"):
        kv_bytes(80 * GIB, 0.09, 6 * GIB, RUNTIME_BYTES)
    assert kv_bytes(80 * GIB, 0.12, 6 * GIB, RUNTIME_BYTES) > 0
