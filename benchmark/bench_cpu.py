"""The CPU backend against SGLang's torch_native, pass by pass, without a server.

Two processes load the same model with the same settings: `stock` has torch_native attention and
this package's stand-ins for the kernels that SGLang lacks here, `qspec` has all of the CPU backend.
They are pinned to the same cores and work in turn, one pass at a time each, so that noise meets
both. All figures are medians.

    python -m benchmark.bench_cpu --cores 0

Last line JSON: `decode_speedup_b1` and `decode_speedup_b4` (stock's decode step over ours, batch 1
and 4), `verify8_over_decode` (a verify pass of 8 tokens over a decode step, ours, batch 1) and
`matmul_share` (the matrix products of a decode step, timed alone, over the step).
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sglang_qspec.config import parse_cores

VERIFY_TOKENS = 8
KINDS = ("stock", "qspec")


def main() -> None:
    options = parse()
    # Before torch, which reads the number of threads once; the children inherit both.
    cores = parse_cores(options.cores)
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if options.model_path is None:
        from sglang_qspec.models import demo_models

        options.model_path = demo_models().target
    from sglang_qspec.cpu.install import install_kernels

    if not install_kernels():
        raise SystemExit("SGLang has CPU kernels of its own on this machine: nothing to compare")
    spawn = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    children = []
    for kind in KINDS:
        ours, theirs = spawn.Pipe()
        child = spawn.Process(target=serve, args=(theirs, kind, options), daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        connections[kind] = ours
        print(f"{kind}: {ours.recv()}", file=sys.stderr)
    report(options, measure(connections, options))
    for connection in connections.values():
        connection.close()
    for child in children:
        child.join()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model-path", type=Path, help="default: the demo target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=512, help="tokens before each pass")
    parser.add_argument("--passes", type=int, default=40, help="of each kind, in each process")
    parser.add_argument("--cores", default="0", help="that both processes run on")
    return parser.parse_args()


def measure(connections: dict[str, Connection], options: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds by "child pass"."""
    work = [
        (kind, name)
        for name in ("decode_b1", "decode_b4", "verify_b1", "matmul_b1")
        for kind in KINDS
        # Stock torch_native cannot verify trees, and its products are not at issue.
        if kind == "qspec" or name.startswith("decode")
    ]
    times: dict[str, list[float]] = {f"{kind} {name}": [] for kind, name in work}
    for index in range(options.passes + 3):
        for kind, name in work:
            connections[kind].send(name)
            elapsed = connections[kind].recv()
            if index >= 3:
                times[f"{kind} {name}"].append(elapsed * 1e3)
    return {key: statistics.median(values) for key, values in times.items()}


def report(options: argparse.Namespace, median: dict[str, float]) -> None:
    print(f"\n{options.dtype}, {options.context} tokens of context, cores {options.cores}")
    for key, value in median.items():
        print(f"  {key:18} {value:8.2f} ms")
    step = median["qspec decode_b1"]
    figures = {
        "decode_speedup_b1": median["stock decode_b1"] / step,
        "decode_speedup_b4": median["stock decode_b4"] / median["qspec decode_b4"],
        "verify8_over_decode": median["qspec verify_b1"] / step,
        "matmul_share": median["qspec matmul_b1"] / step,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def serve(connection: Connection, kind: str, options: argparse.Namespace) -> None:
    """A child: load, then answer each name of a pass with the seconds that it took."""
    logging.getLogger("sglang").setLevel(logging.ERROR)
    if kind == "stock":
        import sglang_qspec.engine.cpu

        sglang_qspec.engine.cpu.activate = lambda: None
    passes = make_passes(kind, options)
    connection.send("loaded")
    while True:
        try:
            name = connection.recv()
        except EOFError:
            break
        connection.send(passes[name]())
    # Tearing down torch and SGLang module by module would take seconds.
    os._exit(0)


def make_passes(kind: str, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    import torch

    from sglang_qspec.sidecar.draft_model import DraftModel, DraftModelOptions

    class Target(DraftModel):
        """The rows of a draft model, with a pass that verifies."""

        @torch.inference_mode()
        def verify(self, row: int, token_ids: list[int]) -> torch.Tensor:
            """Logits [D, vocab] of D tokens in a chain after the row's; the row keeps them."""
            from sglang.srt.model_executor.forward_batch_info import ForwardMode
            from sglang.srt.speculative.ngram_info import NgramVerifyInput

            width, prefix = len(token_ids), self.length(row)
            slots = self._rows.append([row], [width])
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
            layers = [m for m in model.modules() if isinstance(m, LinearBase)]
            dtype = self._runner.dtype
            calls: list[Callable[[], Any]] = []
            for layer in layers:
                rows = torch.randn(1, layer.input_size, dtype=dtype)
                calls.append(
                    lambda layer=layer, rows=rows: layer.quant_method.apply(layer, rows, None)
                )
            rows = torch.randn(1, model.config.hidden_size, dtype=dtype)
            processor = model.logits_processor
            calls.append(lambda: processor._compute_lm_head(rows, model.lm_head))
            return calls

    model = Target(
        DraftModelOptions(
            str(options.model_path),
            dtype=options.dtype,
            device="cpu",
            max_total_tokens=5 * options.context + 1024,
            context_len=options.context + 64,
            rows=8,
            attention_backend="torch_native" if kind == "stock" else None,
        )
    )
    generator = torch.Generator().manual_seed(0)
    rows = [model.open() for _ in range(4)]
    for row in rows:
        prompt = torch.randint(1000, 20000, (options.context,), generator=generator)
        model.extend([row], [prompt.tolist()])
    products = model.products()

    def timed(work: Callable[[], Any], used: int) -> float:
        began = time.perf_counter()
        work()
        elapsed = time.perf_counter() - began
        for row in rows[:used]:
            model.truncate(row, options.context)
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
