"""Compares the speed of the draft model with the target's own decoding, without a server.

The drafter drafts completions of prompts of one length, 1 to 64 rows at a time. The benchmark times
passes, sampling and the drafter's own work separately. A second process decodes one request with
the target in the target's own dtype, after a prompt of the same length. Both processes are pinned
to the same cores, by default one, and work in turn, run by run (A B A B). Figures are medians over
the rounds. A ratio of drafted to decoded tokens is of one round.

    python -m benchmark.bench_sidecar --cores 1

The last line is JSON: `ratio_8` (tokens per second drafted at 8 completions over the target's plain
decode, with the smallest and largest round in `ratio_8_spread`), `drafted_tokens_per_s_8`,
`plain_tokens_per_s`, `rows` (for each number of rows `step_ms`, `model_ms`, `sample_ms`,
`drafter_ms`, `tokens_per_s` and `ratio`), `prefill_ms` and the conditions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from benchmark.harness.child import Child, draft_model, pin
from benchmark.harness.options import parser_of, positive
from benchmark.harness.output import print_record
from benchmark.harness.report import Table
from benchmark.harness.statistics import SPREADS, Ratio, ratio_record, rounded
from benchmark.harness.stopwatch import Stopwatch

TIMES = ("step_ms", "model_ms", "sample_ms", "drafter_ms", "tokens_per_s")


def main() -> None:
    options = _options()
    pin(options.cores)
    if options.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    path = options.model_path
    if path is None:
        from sglang_qspec.tools.models import demo_models

        demo = demo_models(on_cuda=options.device != "cpu")
        path = str(demo.draft)
        options.target_path = options.target_path or str(demo.target)
    model = open_model(path, options, rows=64)
    target = Child(decoder, options) if options.target_path else None
    bench = Bench(model, options)
    bench.run(4)
    prefill_ms = bench.prefill()
    plain: list[float] = []
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in options.rows}
    for _ in range(options.rounds):
        for count, runs in rows.items():
            if target is not None:
                plain.append(target.ask())
            runs.append(bench.run(count))
            if target is not None:
                runs[-1]["ratio"] = runs[-1]["tokens_per_s"] / plain[-1]
    report(options, model, prefill_ms, rows, statistics.median(plain) if plain else None)
    if target is not None:
        target.shutdown()


def open_model(path: str, options: argparse.Namespace, rows: int) -> Any:
    """A DraftModel with KV for `rows` requests of the prompt's and completion's length."""
    length = options.prompt + options.tokens
    sizes = {"max_total_tokens": rows * length + 4096, "context_len": length + 64}
    place = {"dtype": options.dtype, "device": options.device, "mem_fraction": 0.2}
    return draft_model(path, **place, **sizes)


class Bench:
    """A draft model, and prompts of random tokens for it."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        import torch

        self.model = model
        self.tokens = options.tokens
        self.size = options.prompt
        self._random = torch.Generator().manual_seed(0)

    def prompt(self) -> list[int]:
        import torch

        low, high = 1000, self.model.vocab_size
        return torch.randint(low, high, (self.size,), generator=self._random).tolist()

    def prefill(self) -> float:
        """Median milliseconds of the prefill of one prompt."""
        times = []
        for _ in range(5):
            row = self.model.rows.open()
            began = time.perf_counter()
            self.model.extend([row], [self.prompt()])[0, 0].item()
            times.append(time.perf_counter() - began)
            self.model.rows.close(row)
        return statistics.median(times) * 1e3

    def run(self, rows: int) -> dict[str, float]:
        """Draft `rows` completions, at most 8 of each prompt. Returns the medians of TIMES."""
        from sglang_qspec.link import Peer
        from sglang_qspec.messages import Submit
        from sglang_qspec.sidecar import pass_runner
        from sglang_qspec.sidecar.drafter import Drafter

        drafter = Drafter(self.model, max_completion_tokens=self.tokens)
        peer = Peer("bench", b"")
        completions = min(rows, 8)
        for place in range(-(-rows // 8)):
            asked = (place, self.prompt(), 0, self.tokens, completions, 0.6)
            drafter.submit(peer, Submit(*asked, ignore_eos=True))
        times = []
        model_s, sample_s = Stopwatch(), Stopwatch()
        with model_s.on(self.model, "step"), sample_s.on(pass_runner, "choose_shared"):
            while not drafter.idle:
                model_s.reset()
                sample_s.reset()
                began = time.perf_counter()
                drafter.step()
                elapsed = time.perf_counter() - began
                drafter.take()
                if drafter.advanced == rows and model_s.calls and sample_s.calls == 1:
                    times.append((elapsed, model_s.seconds, sample_s.seconds))
        drafter.drop(peer)
        drafter.check_integrity()
        step, model, sample = (statistics.median(part) * 1e3 for part in zip(*times, strict=True))
        found = (step, model, sample, step - model - sample, rows / step * 1e3)
        return dict(zip(TIMES, found, strict=True))


def decoder(options: argparse.Namespace) -> Callable[[Any], float]:
    """In a child: load the target; returns a greedy decode that measures its tokens per second."""
    import torch

    model = open_model(options.target_path, options, rows=2)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1000, model.vocab_size, (options.prompt,), generator=generator)
    row = model.rows.open()
    first = int(model.extend([row], [prompt.tolist()])[0].argmax())

    def decode(_: Any = None) -> float:
        token, times = first, []
        for _ in range(options.tokens):
            began = time.perf_counter()
            token = int(model.step([row], [token])[0].argmax())
            times.append(time.perf_counter() - began)
        model.rows.truncate(row, options.prompt)
        return 1.0 / statistics.median(times)

    decode()
    return decode


def report(
    options: argparse.Namespace,
    model: Any,
    prefill_ms: float,
    rows: dict[int, list[dict[str, float]]],
    plain: float | None,
) -> None:
    """Print the medians of each number of rows; `plain` is in tokens per second."""
    title = (
        f"{model.name}, {model.quantization or 'not quantized'}, {model.dtype}, {model.device}; "
        f"prompts of {options.prompt} tokens, {options.tokens} drafted; medians, in ms"
    )
    note = f"prefill of one prompt: {prefill_ms:.1f} ms"
    if plain is not None:
        note += f"; plain decode of the target in {options.dtype}, batch 1: {plain:.1f} tokens/s"
    ratios = {
        count: Ratio(tuple(run["ratio"] for run in runs)) if plain is not None else None
        for count, runs in rows.items()
    }
    records: list[dict[str, Any]] = []
    for count, runs in rows.items():
        medians = {name: statistics.median_low(run[name] for run in runs) for name in runs[0]}
        records.append({"rows": count, **medians, **ratio_record("ratio", ratios[count])})
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        **{name: itemgetter(name) for name in ("rows", *TIMES)},
        "ratio": lambda record: ratios[record["rows"]],
    }
    print(Table.of(title, records, columns, f"{note}\n{SPREADS}").text())
    eight = next((record for record in records if record["rows"] == 8), {})
    result = {
        "drafted_tokens_per_s_8": eight.get("tokens_per_s"),
        "plain_tokens_per_s": plain,
        "rows": records,
        "prefill_ms": prefill_ms,
        "prompt_tokens": options.prompt,
        "model": model.name,
        "dtype": model.dtype,
        "clock": "wall time",
        "cores": options.cores,
    }
    print_record({**ratio_record("ratio_8", ratios.get(8)), **rounded(result)})


def _options() -> argparse.Namespace:
    parser = parser_of("bench_sidecar", __doc__)
    add = parser.add_argument
    add("--model-path", help="draft model (default: the demo model)")
    add("--target-path", help="target model (default: the demo model)")
    add("--dtype", default="bfloat16")
    add("--device", default="cpu")
    add("--cores", default="1", help="processors, such as 0-3 (default: 1)")
    add("--prompt", type=positive, default=200, help="tokens of a prompt (default: 200)")
    add("--tokens", type=positive, default=48, help="tokens of a completion (default: 48)")
    add("--rounds", type=positive, default=3, help="figures are medians (default: 3)")
    add("--rows", type=positive, nargs="+", default=[1, 8, 16, 32, 64])
    return parser.parse_args()


if __name__ == "__main__":
    main()
