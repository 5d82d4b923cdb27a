"""Int8 products and a Llama decoder, compiled for CPUs with AVX-512 and VNNI.

Arrays are numpy's, in C order and of exactly the types given here. ValueError where a shape does
not fit.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class PackedInt8:
    """A weight `q` [outputs, inputs] with a `scale` for each output."""

    def __init__(self, q: NDArray[np.int8], scale: NDArray[np.float32]) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    def multiply(self, x: NDArray[np.float32], digits: int, threads: int) -> NDArray[np.float32]:
        """x [rows, inputs] @ weight.T: [rows, outputs].

        Each row is rounded by itself: to 8 bits with one of `digits`, to 16 with two.
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
"""Products qkv, out, gate_up and down; the norms before attention and MLP [hidden]; keys and values
[slots, kv_heads, head_dim], bfloat16 as uint16."""

class Decoder:
    """All layers of a Llama model and its last norm, over KV that belongs to its caller."""

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        final_norm: NDArray[np.float32],
        cos_sin: NDArray[np.float32],
        heads: int,
        kv_heads: int,
        eps: float,
    ) -> None:
        """`cos_sin` [positions, head_dim]: of all angles the cosines, then the sines."""

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
        """New tokens [tokens], in order within a row: `hidden` [tokens, hidden] changes in place.

        `slots` are where their KV goes, and `table[row]` has the slot of each position of a row,
        the new ones' too.
        """
