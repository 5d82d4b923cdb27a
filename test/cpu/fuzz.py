"""Fuzzes the compiled products and decoder with random shapes and arguments, valid and invalid.

    python -m test.cpu.fuzz --module _native_avx2 --operations 1000 --seed 1

The command prints the number of operations, or the exception of the first operation that failed. It
compares a product with numpy's product. It compares a decoder pass over several rows with passes
over one token each, which must give the same bits. `test_native.py` compares the decoder with
torch. This file does not import torch, so that a build with sanitizers runs fast.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sglang_qspec.cpu._native import NativeLayer

REFUSED = (ValueError, TypeError)
EXTREMES = (-(1 << 80), -(1 << 31), -1, 0, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 63)


@dataclass
class Made:
    """A decoder, its hidden size, and its numbers of positions (`reach`) and KV slots."""

    decoder: Any
    hidden: int
    reach: int
    slots: int
    table: np.ndarray
    pools: list[np.ndarray]


class KernelFuzz:
    """Products and decoders of random shapes, by one of the compiled modules."""

    def __init__(self, native: Any, seed: int) -> None:
        self.native = native
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.operations = 0

    def run(self, operations: int) -> None:
        """Run this number of random operations; raises the first failure."""
        actions = (self.multiply, self.multiply, self.multiply_anything, self.decode)
        for _ in range(operations):
            self.random.choice((*actions, self.decode_anything, self.make_anything))()
            self.operations += 1

    def floats(self, *shape: int) -> NDArray[np.float32]:
        return self.numbers.standard_normal(shape, np.float32)

    def norm(self, hidden: int) -> NDArray[np.float32]:
        return np.float32(1) + self.floats(hidden) / np.float32(10)

    def packed(self, outputs: int, inputs: int) -> Any:
        return self.native.PackedInt8(*self.weight(outputs, inputs))

    def weight(self, outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
        q = self.numbers.integers(-127, 128, (outputs, inputs), np.int8)
        return q, np.abs(self.floats(outputs)) / (100 * inputs**0.5)

    def multiply(self) -> None:
        outputs = self.random.choice((1, 15, 16, 17, 63, 64, 65, self.random.randint(1, 300)))
        inputs = self.random.choice((1, 3, 4, 16, 17, self.random.randint(1, 300)))
        rows = self.random.choice((0, 1, 2, 5, self.random.randint(1, 40)))
        q, scale = self.weight(outputs, inputs)
        x = self.floats(rows, inputs) * np.float32(self.random.choice((1, 1e-20, 1e10)))
        expected = x.astype(np.float64) @ (q * scale[:, None].astype(np.float64)).T
        digits, threads = self.random.randint(1, 2), self.random.choice((1, 1, 2, 5))
        weight = self.native.PackedInt8(q, scale)
        actual = weight.multiply(x, digits, threads)
        assert actual.shape == (rows, outputs)
        # Rounding is at most half a step for each input.
        span = x.max(1) - x.min(1) if digits == 1 else np.abs(x).max(1) / 100
        bound = (span[:, None] / 255 + 1e-30) * np.abs(q * scale[:, None]).sum(1) if rows else 0
        assert (np.abs(actual - expected) <= bound + 1e-4 * np.abs(expected) + 1e-25).all()
        odd = np.array([np.nan, np.inf, -np.inf, 3e38, 1e-40], np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            weight.multiply(np.resize(odd, x.shape), digits, threads)  # must not crash

    def multiply_anything(self) -> None:
        weight = self.packed(5, 8)
        shape = [self.random.randint(0, 9) for _ in range(self.random.randint(0, 3))]
        dtype: Any = self.random.choice((np.float32, np.float32, np.float64))
        x = self.floats(*shape).astype(dtype)
        digits = self.random.choice((1, 2, 0, 3, *EXTREMES))
        threads = self.random.choice((1, 2, 0, *EXTREMES))
        try:
            y = weight.multiply(x, digits, threads)
        except REFUSED:
            return
        assert y.shape == (x.shape[0], 5)
        assert x.shape[1] == 8
        assert x.dtype == np.float32

    def layers(self, sizes: dict[str, int], pools: list[np.ndarray]) -> list[NativeLayer]:
        hidden, heads, kv_heads, dim = (sizes[k] for k in ("hidden", "heads", "kv_heads", "dim"))
        made = []
        for keys, values in zip(pools[::2], pools[1::2], strict=True):
            inner = 16 * self.random.randint(1, 12)  # differs between layers
            made.append(
                (
                    self.packed((heads + 2 * kv_heads) * dim, hidden),
                    self.packed(hidden, heads * dim),
                    self.packed(2 * inner, hidden),
                    self.packed(hidden, inner),
                    self.norm(hidden),
                    self.norm(hidden),
                    keys,
                    values,
                )
            )
        return made

    def make(self) -> Made:
        kv_heads = self.random.randint(1, 3)
        sizes = {
            "hidden": 16 * self.random.randint(1, 8),
            "kv_heads": kv_heads,
            "heads": kv_heads * self.random.randint(1, 6),
            "dim": self.random.choice((64, 64, 128)),
        }
        reach, slots = self.random.randint(1, 40), self.random.randint(2, 90)
        dtype = self.random.choice((np.float32, np.uint16))
        pools = [
            np.zeros((slots, kv_heads, sizes["dim"]), dtype)
            for _ in range(2 * self.random.randint(1, 3))
        ]
        decoder = self.native.Decoder(
            self.layers(sizes, pools),
            self.norm(sizes["hidden"]),
            self.floats(reach, sizes["dim"]),
            sizes["heads"],
            kv_heads,
            1e-5,
        )
        rows = max(1, min(3, slots // reach))
        order = self.numbers.permutation(max(slots, rows * reach))[: rows * reach]
        table = (order % slots).astype(np.int32).reshape(rows, reach)
        return Made(decoder, sizes["hidden"], reach, slots, table, pools)

    def pass_of(self, made: Made, parts: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
        """One pass over (row, first position, tokens)."""
        rows = np.concatenate([np.full(len(x), row, np.int64) for row, _, x in parts])
        positions = np.concatenate(
            [np.arange(first, first + len(x), dtype=np.int64) for _, first, x in parts]
        )
        hidden = np.concatenate([x for _, _, x in parts])
        threads = self.random.choice((1, 1, 3))
        slots = made.table[rows, positions].astype(np.int64)
        made.decoder.forward(hidden, positions, slots, rows, made.table, 2, threads)
        assert np.isfinite(hidden).all()
        return hidden

    def decode(self) -> None:
        made = self.make()
        if len(np.unique(made.table)) < made.table.size:
            made.table = made.table[
                :1, : made.slots
            ]  # rows that share slots would not be reproducible
        rows, reach = made.table.shape
        lengths = [self.random.randint(1, reach) for _ in range(rows)]
        texts = [self.floats(length, made.hidden) for length in lengths]
        if len(np.unique(made.table)) < made.table.size:
            return
        together = self.pass_of(made, [(row, 0, text) for row, text in enumerate(texts)])
        kept = [pool.copy() for pool in made.pools]
        alone = [
            self.pass_of(made, [(row, at, text[at : at + 1])])
            for row, text in enumerate(texts)
            for at in range(len(text))
        ]
        assert np.array_equal(together, np.concatenate(alone))
        assert all(np.array_equal(a, b) for a, b in zip(kept, made.pools, strict=True))

    def decode_anything(self) -> None:
        made = self.make()
        n = self.random.randint(0, 4)

        def numbers(most: int) -> np.ndarray:
            allowed = [self.random.randrange(most) for _ in range(n)]
            if n and self.random.random() < 0.2:
                allowed[-1] = self.random.choice((-1, most, -(1 << 63), (1 << 63) - 1, 1 << 32))
            return np.array(allowed, np.int64)

        table = made.table.copy()
        if self.random.random() < 0.3:
            wrong = (-1, made.slots, 1 << 30, -(1 << 31))
            table[:, self.random.randrange(table.shape[1])] = self.random.choice(wrong)
        if self.random.random() < 0.1:
            table = table[:, : self.random.randint(0, 2)]
        hidden = self.floats(n, self.random.choice((made.hidden, made.hidden, made.hidden + 16)))
        before = hidden.copy()
        arguments = [numbers(made.reach), numbers(made.slots), numbers(len(made.table)), table]
        work = [self.random.choice((1, 2, 2, 0)), self.random.choice((1, 2, 0, 1 << 31))]
        try:
            made.decoder.forward(hidden, *arguments, *work)
        except REFUSED:
            assert np.array_equal(hidden, before)

    def make_anything(self) -> None:
        """A decoder with one argument that may not fit."""
        pools = [np.zeros((8, 1, 64), np.float32) for _ in range(4)]
        layers: list[Any] = [
            *self.layers({"hidden": 32, "heads": 2, "kv_heads": 1, "dim": 64}, pools)
        ]
        part = self.random.randrange(8)
        wrong: Any = self.random.choice(
            (
                None,
                self.packed(self.random.randint(1, 200), self.random.randint(1, 200)),
                self.floats(self.random.randint(0, 40)),
                np.zeros((8, 1, 64), self.random.choice((np.float32, np.uint16, np.float64))),
                np.zeros([self.random.randint(0, 9) for _ in range(3)], np.float32),
            )
        )
        place = self.random.randrange(2)
        layers[place] = (*layers[place][:part], wrong, *layers[place][part + 1 :])
        sizes: list[Any] = [2, 1, 1e-5]
        if self.random.random() < 0.5:
            at = self.random.randrange(3)
            sizes[at] = self.random.choice((*EXTREMES, 3, float("nan")))
        given: Any = self.random.choice((layers, layers[:1], [], [None], [()]))
        try:
            decoder = self.native.Decoder(
                given,
                self.floats(self.random.choice((32, 32, 0, 16))),
                self.floats(self.random.choice((9, 0)), self.random.choice((64, 64, 0, 96))),
                *sizes,
            )
        except REFUSED:
            return
        one, zero = self.floats(1, 32), np.zeros(1, np.int64)
        decoder.forward(one, zero, zero, zero, np.zeros((1, 1), np.int32), 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", default="_native", choices=("_native", "_native_avx2"))
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    native = import_module(f"sglang_qspec.cpu.{options.module}")
    fuzz = KernelFuzz(native, options.seed)
    fuzz.run(options.operations)
    print(f"{fuzz.operations} operations")


if __name__ == "__main__":
    main()
