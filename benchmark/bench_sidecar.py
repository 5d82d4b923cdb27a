"""How fast the draft model drafts, against the target's own decoding, without a server.

The drafter works through prompts of one length, each with its completions, so that 1 to 64 rows are
decoded at a time; passes, sampling and the drafter's own work are timed apart. A second process
decodes one request with the target in the target's own dtype, after a prompt of the same length.
Both are pinned to the same cores, by default one, and work in turn, run by run (A B A B). Figures
are medians over the rounds; the ratio of drafted to decoded tokens is taken within a round.

    python -m benchmark.bench_sidecar --cores 1

With --load it measures the drafter's own work with many live requests while KV is scarce, and a
light server's wait beside greedy servers (`benchmark.sidecar.load`). The last line is JSON with
`submissions` and `servers` then.

Otherwise the last line is JSON: `ratio_8` (tokens per second drafted at 8 completions over the
target's plain decode, with the least and greatest round in `ratio_8_spread`),
`drafted_tokens_per_s_8`, `plain_tokens_per_s`, `rows` (for each number of rows `step_ms`,
`model_ms`, `sample_ms`, `drafter_ms`, `tokens_per_s` and `ratio`), `prefill_ms` and how it was
measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmark.harness.child import Child, pin
from benchmark.harness.output import print_record
from benchmark.harness.report import Table
from benchmark.harness.statistics import SPREADS, Ratio, number, ratio_record, rounded

TIMES = ("step_ms", "model_ms", "sample_ms", "drafter_ms", "tokens_per_s")


def main() -> None:
    options = _options()
    if options.cores:
        pin(options.cores)
    if options.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    path = options.model_path
    if path is None:
        from sglang_qspec.models import demo_models

        path = str(demo_models().draft)
        options.target_path = options.target_path or str(demo_models().target)
    alone = options.profile or options.load
    target = Child(decoder, options) if options.target_path and not alone else None
    model = open_model(path, options, rows=64, quantization=options.quantization)
    if options.load:
        report_load(options, model)
        return
    bench = Bench(model, options)
    bench.run(4)
    if options.profile:
        profile(bench, options.profile)
        return
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
        target.close()


def clock_of(options: argparse.Namespace) -> Callable[[], float]:
    """Seconds; of this process's processor time with --cpu-time."""
    return time.process_time if options.cpu_time else time.perf_counter


def open_model(path: str, options: argparse.Namespace, rows: int, **more: Any) -> Any:
    """A DraftModel with KV for `rows` requests of the prompt's and completion's length."""
    from sglang_qspec.sidecar.draft_model import DraftModel, DraftModelOptions

    length = options.prompt + options.tokens
    return DraftModel(
        DraftModelOptions(
            path,
            dtype=options.dtype,
            device=options.device,
            max_total_tokens=rows * length + 4096,
            context_len=length + 64,
            mem_fraction=options.mem_fraction,
            **more,
        )
    )


class Bench:
    """One draft model, and prompts of random tokens for it."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        import torch

        self.model = model
        self.tokens = options.tokens
        self.size = options.prompt
        self._clock = clock_of(options)
        self._random = torch.Generator().manual_seed(0)

    def prompt(self) -> list[int]:
        import torch

        low, high = 1000, self.model.vocab_size
        return torch.randint(low, high, (self.size,), generator=self._random).tolist()

    def prefill(self) -> float:
        """Median milliseconds to read one prompt."""
        times = []
        for _ in range(5):
            row = self.model.open()
            began = self._clock()
            self.model.extend([row], [self.prompt()])[0, 0].item()
            times.append(self._clock() - began)
            self.model.close(row)
        return statistics.median(times) * 1e3

    def run(self, rows: int) -> dict[str, float]:
        """Draft `rows` completions of one prompt (8 of each of `rows` / 8 prompts over 8)."""
        from sglang_qspec.link import Peer
        from sglang_qspec.messages import Submit
        from sglang_qspec.sidecar import pass_runner as module
        from sglang_qspec.sidecar.drafter import Drafter

        model_s = Timed(self.model.step, self._clock)
        sample_s = Timed(module.choose, self._clock)
        self.model.step, module.choose = model_s, sample_s
        drafter = Drafter(self.model, max_completion_tokens=self.tokens)
        peer = Peer("bench", b"")
        completions = min(rows, 8)
        for place in range(-(-rows // 8)):
            asked = (place, self.prompt(), 0, self.tokens, completions, 0.6)
            drafter.submit(peer, Submit(*asked, ignore_eos=True))
        times = []
        while not drafter.idle:
            began, before = self._clock(), model_s.calls
            model_s.seconds = sample_s.seconds = 0.0
            drafter.step()
            elapsed = self._clock() - began
            drafter.take()
            if drafter.rows == rows and model_s.calls > before and sample_s.calls == 1:
                times.append((elapsed, model_s.seconds, sample_s.seconds))
            sample_s.calls = 0
        drafter.drop(peer)
        drafter.check_integrity()
        del self.model.step
        module.choose = sample_s.function
        step, model, sample = (statistics.median(part) * 1e3 for part in zip(*times, strict=True))
        found = (step, model, sample, step - model - sample, rows / step * 1e3)
        return dict(zip(TIMES, found, strict=True))


def decoder(options: argparse.Namespace) -> Callable[[Any], float]:
    """In a child: load the target; returns a greedy decode that measures its tokens per second."""
    import torch

    clock = clock_of(options)
    model = open_model(options.target_path, options, rows=2)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1000, model.vocab_size, (options.prompt,), generator=generator)
    row = model.open()
    first = int(model.extend([row], [prompt.tolist()])[0].argmax())

    def decode(_: Any = None) -> float:
        token, times = first, []
        for _ in range(options.tokens):
            began = clock()
            token = int(model.step([row], [token])[0].argmax())
            times.append(clock() - began)
        model.truncate(row, options.prompt)
        return 1.0 / statistics.median(times)

    decode()
    return decode


class Timed:
    """A function that adds up its calls and their seconds."""

    def __init__(self, function: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.function = function
        self.seconds = 0.0
        self.calls = 0
        self._clock = clock

    def __call__(self, *args: Any) -> Any:
        began = self._clock()
        result = self.function(*args)
        self.seconds += self._clock() - began
        self.calls += 1
        return result


def profile(bench: Bench, rows: int) -> None:
    """Print the time of the passes by operator."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        bench.run(rows)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


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
    records, lines, ratios = [], [], {}
    for count, runs in rows.items():
        medians = {name: statistics.median_low(run[name] for run in runs) for name in runs[0]}
        ratios[count] = Ratio(tuple(run["ratio"] for run in runs)) if "ratio" in medians else None
        records.append({"rows": count, **medians, **ratio_record("ratio", ratios[count])})
        lines.append([str(count), *(number(medians[n]) for n in TIMES), number(ratios[count])])
    print(Table(title, ["rows", *TIMES, "ratio"], lines, f"{note}\n{SPREADS}").text())
    eight = next((record for record in records if record["rows"] == 8), {})
    result = {
        "drafted_tokens_per_s_8": eight.get("tokens_per_s"),
        "plain_tokens_per_s": plain,
        "rows": records,
        "prefill_ms": prefill_ms,
        **measured(options, model),
    }
    print_record({**ratio_record("ratio_8", ratios.get(8)), **rounded(result)})


def report_load(options: argparse.Namespace, model: Any) -> None:
    """Measure many requests and then several servers: tables, and a line of JSON."""
    from benchmark.sidecar.load import fair_share, submissions

    sizes = {"size": options.prompt, "tokens": options.tokens}
    loads = [
        submissions(model, live, one_prompt=one_prompt, **sizes)
        for one_prompt in (True, False)
        for live in options.live
    ]
    title = (
        f"{model.name} on {model.device}, prompts of {options.prompt} tokens, "
        f"{model.total_tokens} tokens of KV"
    )
    head = ["live", "prompts", "submits/s", "bookkeeping ms a pass"]
    names = ["live", "prompts", "submits_per_s", "bookkeeping_ms"]
    print(Table(title, head, [[_cell(load[name]) for name in names] for load in loads]).text())
    shares = [fair_share(model, count, requests=8, **sizes) for count in options.servers]
    lines = [
        [_cell(share[name]) for name in ("servers", "light_ms", "slowdown")] for share in shares
    ]
    note = "Over alone is of one round and has no spread."
    print(Table("Servers", ["servers", "light request, ms", "over alone"], lines, note).text())
    result = {"submissions": loads, "servers": shares, **measured(options, model)}
    print_record(rounded(result))


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, str) else number(value)


def measured(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What was measured, for JSON."""
    return {
        "prompt_tokens": options.prompt,
        "model": model.name,
        "dtype": model.dtype,
        "clock": "processor time" if options.cpu_time else "wall time",
        "cores": options.cores,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", help="by default the demo models' draft")
    parser.add_argument("--target-path", help="by default the demo models' target")
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cores", default="1")
    parser.add_argument("--mem-fraction", type=float, default=0.2)
    parser.add_argument("--prompt", type=int, default=200, help="tokens in a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens in a completion")
    parser.add_argument("--rounds", type=int, default=3, help="over all numbers of rows; medians")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument(
        "--load", action="store_true", help="many requests and several servers instead"
    )
    parser.add_argument(
        "--live", type=int, nargs="+", default=[1, 100, 10_000], help="requests, with --load"
    )
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[2, 8], help="at one sidecar, with --load"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="of this process, where others share its cores"
    )
    parser.add_argument(
        "--profile", type=int, metavar="ROWS", help="profile this many rows instead"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
