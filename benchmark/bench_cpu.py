"""Compares the CPU backend with SGLang's torch_native, pass by pass, without a server.

Two processes load the same model with the same settings. `stock` has torch_native attention and
this package's stand-ins for the kernels that SGLang lacks here; `qspec` has the whole CPU backend.
They are pinned to the same cores and take turns pass by pass, so noise disturbs both. All figures
are medians. Each ratio has its spread over four parts of the run.

    python -m benchmark.bench_cpu --cores 0

The last line is JSON: `decode_speedup_b1` and `decode_speedup_b4` (stock's decode step over ours,
batch 1 and 4), `verify8_over_decode` (our verify pass of 8 tokens over our decode step, batch 1)
and `matmul_share` (the matrix products of a decode step, timed alone, over the step).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark.harness.child import Child, pin
from benchmark.harness.options import parser_of, positive
from benchmark.harness.output import print_record
from benchmark.harness.statistics import SPREADS, Ratio, ratio_record

VERIFY_TOKENS = 8
KINDS = ("stock", "qspec")
WARM_UP_PASSES = 3


def main() -> None:
    options = parse()
    # The children inherit the processors.
    pin(options.cores)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if options.model_path is None:
        from sglang_qspec.tools.models import demo_models

        options.model_path = demo_models().target
    from sglang_qspec.cpu.install import install_kernels

    if not install_kernels():
        raise SystemExit("SGLang has CPU kernels of its own on this machine: nothing to compare")
    children = {kind: Child(serve, kind, options) for kind in KINDS}
    report(options, measure(children, options.passes))
    for child in children.values():
        child.shutdown()


def parse() -> argparse.Namespace:
    parser = parser_of("bench_cpu", __doc__)
    add = parser.add_argument
    add("--model-path", type=Path, help="target model (default: the demo model)")
    add("--dtype", default="bfloat16")
    add("--context", type=positive, default=512, help="tokens before each pass (default: 512)")
    add("--passes", type=positive, default=40, help="of each kind and process (default: 40)")
    add("--cores", default="0", help="processors of both processes, such as 0-3 (default: 0)")
    return parser.parse_args()


def measure(children: Mapping[str, Child], passes: int) -> dict[str, list[float]]:
    """Milliseconds of each pass by "child pass"; the children take turns."""
    work = [
        (kind, name)
        for name in ("decode_b1", "decode_b4", "verify_b1", "matmul_b1")
        for kind in KINDS
        # Stock torch_native cannot verify trees, and its matrix products are not compared.
        if kind == "qspec" or name.startswith("decode")
    ]
    times: dict[str, list[float]] = {f"{kind} {name}": [] for kind, name in work}
    for index in range(passes + WARM_UP_PASSES):
        for kind, name in work:
            elapsed = children[kind].ask(name)
            if index >= WARM_UP_PASSES:
                times[f"{kind} {name}"].append(elapsed * 1e3)
    return times


def report(options: argparse.Namespace, times: Mapping[str, Sequence[float]]) -> None:
    print(f"\n{options.dtype}, {options.context} tokens of context, cores {options.cores}")
    for key, values in times.items():
        print(f"  {key:18} {statistics.median(values):8.2f} ms")
    compared = {
        "decode_speedup_b1": ("stock decode_b1", "qspec decode_b1"),
        "decode_speedup_b4": ("stock decode_b4", "qspec decode_b4"),
        "verify8_over_decode": ("qspec verify_b1", "qspec decode_b1"),
        "matmul_share": ("qspec matmul_b1", "qspec decode_b1"),
    }
    record = {}
    for name, (one, other) in compared.items():
        ratio = Ratio.of_times(times[one], times[other])
        print(f"  {name:20} {ratio}")
        record.update(ratio_record(name, ratio))
    print(f"A round is a quarter of the passes. {SPREADS}")
    print_record(record)


def serve(kind: str, options: argparse.Namespace) -> Callable[[str], float]:
    """In a child: load the model; returns a function that times a pass by its name, in seconds."""
    if kind == "stock":
        import sglang_qspec.engine.cpu

        sglang_qspec.engine.cpu.activate = lambda: None
    passes = make_passes(kind, options)
    return lambda name: passes[name]()


def make_passes(kind: str, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    import torch

    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    class Target(DraftModel):
        """A draft model with verify passes."""

        @torch.inference_mode()
        def verify(self, row: int, token_ids: list[int]) -> torch.Tensor:
            """Logits [D, vocab] of a chain of D tokens after the row, which keeps them."""
            from sglang.srt.model_executor.forward_batch_info import ForwardMode
            from sglang.srt.speculative.ngram_info import NgramVerifyInput

            width, prefix = len(token_ids), self.rows.length(row)
            slots = self.rows.append([row], [width])
            ids = self._on_device(token_ids)
            lengths = torch.tensor([prefix])
            positions = torch.arange(prefix, prefix + width)
            return self._forward(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=1,
                input_ids=ids,
                req_pool_indices=torch.tensor([row]),
                req_pool_indices_cpu=torch.tensor([row]),
                seq_lens=lengths,
                seq_lens_cpu=lengths,
                seq_lens_sum=prefix,
                orig_seq_lens=lengths,
                out_cache_loc=slots,
                positions=positions,
                spec_info=NgramVerifyInput(
                    draft_token=ids,
                    custom_mask=torch.ones(width, width, dtype=torch.bool).tril().flatten(),
                    positions=positions,
                    draft_token_num=width,
                ),
            )

        def products(self) -> list[Callable[[], Any]]:
            """All matrix products of a decode step of one row."""
            from sglang.srt.layers.linear import LinearBase

            model = self._runner.model
            dtype = self._runner.dtype
            layers = [m for m in model.modules() if isinstance(m, LinearBase)]
            rows = [torch.randn(1, layer.input_size, dtype=dtype) for layer in layers]
            last = torch.randn(1, model.config.hidden_size, dtype=dtype)
            head = partial(model.logits_processor._compute_lm_head, last, model.lm_head)
            pairs = zip(layers, rows, strict=True)
            return [*(partial(one.quant_method.apply, one, row, None) for one, row in pairs), head]

    backend = "torch_native" if kind == "stock" else None
    sizes = {"max_total_tokens": 5 * options.context + 1024, "context_len": options.context + 64}
    place = {"dtype": options.dtype, "device": "cpu", "rows": 8, "attention_backend": backend}
    model = Target(DraftModelOptions(str(options.model_path), **place, **sizes))
    generator = torch.Generator().manual_seed(0)
    rows = [model.rows.open() for _ in range(4)]
    for row in rows:
        prompt = torch.randint(1000, 20000, (options.context,), generator=generator)
        model.extend([row], [prompt.tolist()])
    products = model.products()

    def timed(work: Callable[[], Any], used: int) -> float:
        began = time.perf_counter()
        work()
        elapsed = time.perf_counter() - began
        for row in rows[:used]:
            model.rows.truncate(row, options.context)
        return elapsed

    @torch.inference_mode()
    def multiply() -> None:
        for product in products:
            product()

    return {
        "decode_b1": lambda: timed(lambda: model.step(rows[:1], [5]), 1),
        "decode_b4": lambda: timed(lambda: model.step(rows, [5] * 4), 4),
        "verify_b1": lambda: timed(lambda: model.verify(rows[0], [5] * VERIFY_TOKENS), 1),
        "matmul_b1": lambda: timed(multiply, 0),
    }


if __name__ == "__main__":
    main()
