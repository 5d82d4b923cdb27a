"""The accuracy of int8 products on this CPU."""

from sglang_qspec.cpu.linear import _digit
from sglang_qspec.cpu.native import native


def coarser() -> float:
    """Factor by which activations are rounded more coarsely than to 8 bits.

    Without AVX-512 and VNNI a digit has 7 bits, so that FBGEMM sums products exactly.
    """
    return 1.0 if native() is not None else 127 / _digit()
