"""Times packed matrix products on this CPU, by number of rows.

The benchmark computes all linear layers of a decode step of a 135M-parameter Llama (30 layers of
width 576, an LM head over 49152 tokens) one after another, so that the weights come from memory, as
in a model. The products take turns. The figures are medians in milliseconds.

    python -m benchmark.bench_linear --cores 0

The last line is JSON: for each product, milliseconds by number of rows.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable

from benchmark.harness.child import pin
from benchmark.harness.options import parser_of, positive

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Numbers of outputs and inputs of the linear layers in a block: qkv, o, gate and up, down."""
HEAD = (49152, 576)


def main() -> None:
    parser = parser_of("bench_linear", __doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=positive, default=9, help="(default: 9)")
    parser.add_argument("--cores", default="0", help="processors, with one thread each")
    options = parser.parse_args()
    pin(options.cores)
    figures = measure(options.rows, options.rounds)
    print(f"{'':22}" + "".join(f"{rows:>8}" for rows in options.rows) + "  rows")
    for name, by_rows in figures.items():
        print(f"{name:22}" + "".join(f"{value:8.1f}" for value in by_rows.values()))
    print(json.dumps(figures))


def measure(row_counts: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Median milliseconds of all layers, by product and number of rows."""
    import torch

    with torch.inference_mode():
        torch.manual_seed(0)
        weights = [torch.randn(shape) * 0.05 for _ in range(LAYERS) for shape in SHAPES]
        weights.append(torch.randn(HEAD) * 0.05)
        products = {name: [make(w) for w in weights] for name, make in candidates().items()}
        figures: dict[str, dict[int, float]] = {name: {} for name in products}
        for rows in row_counts:
            inputs = [torch.randn(rows, w.shape[1]).bfloat16() for w in weights]
            times: dict[str, list[float]] = {name: [] for name in products}
            for index in range(rounds + 1):
                for name, layers in products.items():
                    began = time.perf_counter()
                    for layer, x in zip(layers, inputs, strict=True):
                        layer(x)
                    if index:
                        times[name].append((time.perf_counter() - began) * 1e3)
            for name, values in times.items():
                figures[name][rows] = round(statistics.median(values), 2)
    return figures


def candidates() -> dict[str, Callable]:  # type: ignore[type-arg]
    """For each product: from a float weight [N, K] to a function of bfloat16 rows [M, K]."""
    import torch
    from torch import Tensor

    from sglang_qspec.cpu.dense_linear import pack, packed_linear
    from sglang_qspec.cpu.linear import Int4Linear, Int8Linear
    from sglang_qspec.cpu.linear_grids import round_int4, round_int8

    def plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
        w = weight.bfloat16()
        return lambda x: torch.nn.functional.linear(x, w)

    def onednn(weight: Tensor) -> Callable[[Tensor], Tensor]:
        w = pack(weight.bfloat16())
        return lambda x: packed_linear(x, w)

    def weight_only_int8(weight: Tensor) -> Callable[[Tensor], Tensor]:
        grid = round_int8(weight)
        scale = grid.scale[:, 0].bfloat16()
        return lambda x: torch._weight_int8pack_mm(x, grid.q, scale)

    def weight_only_int4(weight: Tensor) -> Callable[[Tensor], Tensor]:
        grid = round_int4(weight, 64)
        packed = torch._convert_weight_to_int4pack_for_cpu(grid.q.int(), 1)
        offset = (8 - grid.zero) * grid.scale
        steps = torch.stack([grid.scale, offset], -1).transpose(0, 1).contiguous().bfloat16()
        return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, 64, steps)

    def dynamic_int8(weight: Tensor) -> Callable[[Tensor], Tensor]:
        grid = round_int8(weight)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        # Torch has deprecated quantized tensor types; the pinned release has them.
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(
            grid.q, grid.scale[:, 0].double(), zeros, 0
        )
        packed = torch.ops.quantized.linear_prepack(quantized, None)
        product = torch.ops.quantized.linear_dynamic
        return lambda x: product(x.float(), packed).bfloat16()

    return {
        "bf16 linear": plain,
        "bf16 oneDNN, packed": onednn,
        "int8 weight-only": weight_only_int8,
        "int4 weight-only": weight_only_int4,
        "int8 FBGEMM dynamic": dynamic_int8,
        "Int8Linear (ours)": Int8Linear.quantize,
        "Int4Linear (ours)": lambda weight: Int4Linear.quantize(weight, 64),
    }


if __name__ == "__main__":
    main()
