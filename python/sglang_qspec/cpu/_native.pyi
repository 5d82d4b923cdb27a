"""Operations of decoders, compiled for CPUs with AVX-512 and VNNI, and as `_native_avx2` for AVX2.

Int8 products and the decoder of a draft model, and the operations of a target's layers. Arrays are
numpy arrays in C order, with exactly these types. All calls with arrays raise ValueError for a
value or a shape that is not allowed. Arguments that are called an address are not checked:
`cpu.row_ops`, `cpu.row_attention` and `cpu.dense_linear` take them from tensors.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EXACT_DIGITS: int
"""Number of digits with which a product is more exact than with bfloat16 activations: 2 with
AVX-512, and 1 with AVX2, where a digit has up to 15 bits instead of 8."""

TAKES_FLOAT32: bool
"""Whether `multiply_dense` is faster than oneDNN for few rows of float32: measured with AVX2."""

class PackedInt8:
    """A weight `q` [outputs, inputs] with a `scale` [outputs]."""

    def __init__(self, q: NDArray[np.int8], scale: NDArray[np.float32]) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    def multiply(self, x: NDArray[np.float32], digits: int, threads: int) -> NDArray[np.float32]:
        """Return x [rows, inputs] @ weight.T: [rows, outputs].

        `digits` is 1 or 2: the number of digits to which each value of x is rounded. Each row has
        its own scale.
        """

NativeLayer = tuple[
    PackedInt8,
    PackedInt8,
    PackedInt8,
    PackedInt8,
    NDArray[np.float32],
    NDArray[np.float32],
    NDArray[np.float32] | NDArray[np.uint16],
    NDArray[np.float32] | NDArray[np.uint16],
]
"""Weights qkv, out, gate_up and down; the norms before attention and MLP, [hidden] each; buffers of
keys and values, [slots, kv_heads, head_dim] each, with bfloat16 as uint16."""

class Decoder:
    """All layers of a Llama model and its final norm, over KV buffers of the caller."""

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        final_norm: NDArray[np.float32],
        cos_sin: NDArray[np.float32],
        heads: int,
        kv_heads: int,
        eps: float,
    ) -> None:
        """`cos_sin` [positions, head_dim] has the cosines of all angles, then the sines."""

    def forward(
        self,
        hidden: NDArray[np.float32],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        rows: NDArray[np.int64],
        table: NDArray[np.int32],
        digits: int,
        threads: int,
    ) -> None:
        """Replace embeddings `hidden` [tokens, hidden] by the output of the final norm.

        `positions`, `slots` and `rows` [tokens] are the position, KV slot and KV row of each new
        token; the tokens of a row are in order. `table` [rows, positions] has the KV slot of each
        position, new tokens included. Activations have `digits` digits, 1 or 2.
        """

def rms_norm(
    rows: int,
    weight: int,
    out: int,
    count: int,
    width: int,
    eps: float,
    bfloat16: bool,
    threads: int,
) -> None:
    """Write the RMS norm of `count` rows of `width` values; the first three are addresses.

    `weight` is float32. The values are bfloat16, or float32.
    """

def silu_and_mul(rows: int, out: int, count: int, width: int, bfloat16: bool, threads: int) -> None:
    """Write the SiLU of the first `width` values of each row times the other `width`.

    The first two are addresses.
    """

def rotate(
    rows: int,
    count: int,
    stride: int,
    heads: int,
    dim: int,
    cos_sin: int,
    bfloat16: bool,
    threads: int,
) -> None:
    """Rotate the first `heads` heads of rows that are `stride` values apart, in place.

    `rows` is an address, and `cos_sin` that of float32 [count, dim]: cosines, then sines.
    """

def store_rows(
    rows: int, count: int, stride: int, width: int, slots: int, pool: int, bfloat16: bool
) -> None:
    """Copy rows of `width` values, `stride` apart, to slots of a pool [.., width].

    `rows` and `pool` are addresses, and `slots` that of int64 [count].
    """

def may_use_tiles() -> bool:
    """Whether the processor has AMX with bfloat16, and this process may use it."""

def multiply_dense(
    rows: int,
    weight: int,
    bias: int,
    addend: int,
    out: int,
    count: int,
    inputs: int,
    outputs: int,
    bfloat16: bool,
    threads: int,
) -> None:
    """Write `rows` [count, inputs] @ weight.T + bias + addend: [count, outputs], rounded once.

    The first five are addresses of bfloat16, or float32; those of `bias` [outputs] and `addend`
    [count, outputs] may be 0, and `out` may be `addend`. `weight` is [outputs, inputs]. Raises
    ValueError unless `inputs` is a multiple of 32 and `outputs` of 16.
    """

class RowAttention:
    """The attention of the new tokens of a pass: the last `rows` of each request's `lengths`."""

    def __init__(
        self,
        slots: NDArray[np.int32],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        visible: NDArray[np.bool_],
        heads: int,
        kv_heads: int,
        dim: int,
        scale: float,
    ) -> None:
        """`slots` [requests, positions] has the KV slot of each position.

        `visible` [requests, D, D] says which new tokens of its request a new token sees; it sees
        all earlier positions. `dim` is a multiple of 64.
        """

    def attend(
        self,
        query: int,
        stride: int,
        keys: int,
        values: int,
        slots: int,
        out: int,
        bfloat16: bool,
        threads: int,
    ) -> None:
        """Write one layer to `out` [tokens, heads, dim].

        `query` [tokens, heads, dim], with tokens `stride` values apart, `keys`, `values` and `out`
        are addresses; a pool has `slots` slots.
        """
