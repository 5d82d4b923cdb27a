"""Int8 products and a Llama decoder, compiled for CPUs with AVX-512 and VNNI.

Arrays are numpy arrays in C order, with exactly these types. All calls raise ValueError for a value
or a shape that is not allowed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class PackedInt8:
    """A weight `q` [outputs, inputs] with a `scale` [outputs]."""

    def __init__(self, q: NDArray[np.int8], scale: NDArray[np.float32]) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    def multiply(self, x: NDArray[np.float32], digits: int, threads: int) -> NDArray[np.float32]:
        """Return x [rows, inputs] @ weight.T: [rows, outputs].

        `digits` is 1 or 2: the number of 8-bit digits to which each value of x is rounded. Each row
        has its own scale.
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
        position, new tokens included. Activations have `digits` 8-bit digits, 1 or 2.
        """
