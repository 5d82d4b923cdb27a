"""How fast the draft model drafts, against the target's own decoding, without a server.

The queue drafter works through prompts of one length, each with its completions, so that 1 to 64
rows are decoded at a time; passes, sampling and the drafter's own work are timed apart. A second
process decodes plainly with the target, one request in its own dtype, after as long a prompt. Both
are pinned to the same cores, by default one, and work in turn, run by run (A B A B); figures are
medians over the rounds, and the ratios of drafted to decoded tokens are taken within a round.

    python -m benchmark.bench_sidecar --cores 1

With --load it measures instead what the drafter's own work costs with many live requests, of one
prompt or of different ones, while KV is scarce (`benchmark.sidecar.submissions`), and what servers
that want as much as they can get cost one that wants little (`benchmark.sidecar.servers`). The last
line is JSON then, too: `submissions` and `servers`.

Otherwise the last line is JSON: `ratio_8` (tokens per second drafted at 8 completions over the
target's plain decode), `drafted_tokens_per_s_8`, `plain_tokens_per_s`, `rows` (for each number of
rows `step_ms`, `model_ms`, `sample_ms`, `drafter_ms`, `tokens_per_s` and `ratio`), `prefill_ms`
and how it was measured.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    global clock
    options = _options()
    if options.cpu_time:
        clock = time.process_time
    if options.cores:
        # Before torch, which reads the number of threads once.
        from sglang_qspec.config import parse_cores

        cores = parse_cores(options.cores)
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    if options.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

    from sglang_qspec.sidecar.draft_model import DraftModel, DraftModelOptions

    path = options.model_path
    if path is None:
        from sglang_qspec.models import demo_models

        path = str(demo_models().draft)
        options.target_path = options.target_path or str(demo_models().target)
    alone = options.profile or options.load
    target = Target(options) if options.target_path and not alone else None
    model = DraftModel(
        DraftModelOptions(
            path,
            quantization=options.quantization,
            dtype=options.dtype,
            device=options.device,
            max_total_tokens=64 * (options.prompt + options.tokens) + 4096,
            context_len=options.prompt + options.tokens + 64,
            mem_fraction=options.mem_fraction,
        )
    )
    if options.load:
        report_load(options, model)
        return
    bench = Bench(model, options.prompt, options.tokens)
    bench.run(4)
    if options.profile:
        profile(bench, options.profile)
        return
    prefill_ms = bench.prefill()
    runs: list[list[dict[str, float]]] = []
    plain: list[float] = []
    for _ in range(options.rounds):
        runs.append([])
        for count in options.rows:
            if target is not None:
                plain.append(target.decode())
            runs[-1].append(bench.run(count))
            if target is not None:
                runs[-1][-1]["ratio"] = runs[-1][-1]["tokens_per_s"] / plain[-1]
    # One row for each number of rows, of medians over the rounds.
    rows = [
        {name: statistics.median_low(run[name] for run in same) for name in same[0]}
        for same in zip(*runs, strict=True)
    ]
    report(options, model, prefill_ms, rows, statistics.median(plain) if plain else None)
    if target is not None:
        target.close()


clock = time.perf_counter
"""Seconds; processor time with --cpu-time."""


class Bench:
    """One draft model, and prompts of random tokens for it."""

    def __init__(self, model: Any, prompt: int, tokens: int) -> None:
        import torch

        self.model = model
        self.tokens = tokens
        self.size = prompt
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
            began = clock()
            self.model.extend([row], [self.prompt()])[0, 0].item()
            times.append(clock() - began)
            self.model.close(row)
        return statistics.median(times) * 1e3

    def run(self, rows: int) -> dict[str, float]:
        """Draft `rows` completions of one prompt (8 of each of `rows` / 8 prompts over 8)."""
        from sglang_qspec.link import Peer
        from sglang_qspec.messages import Submit

        # As a module that something is put into for a while.
        queue_drafter: Any = importlib.import_module("sglang_qspec.sidecar.drafter")

        model_s = Timed(self.model.step)
        sample_s = Timed(queue_drafter.choose)
        self.model.step, queue_drafter.choose = model_s, sample_s
        drafter = queue_drafter.Drafter(self.model, max_completion_tokens=self.tokens)
        peer = Peer("bench", b"")
        for number in range(-(-rows // 8)):
            submit = Submit(number, self.prompt(), 0, self.tokens, min(rows, 8), 0.6)
            drafter.submit(peer, msgspec_replace(submit, ignore_eos=True))
        steps, models, samples = [], [], []
        while not drafter.idle:
            began = clock()
            model_s.seconds = sample_s.seconds = 0.0
            before = model_s.calls
            drafter.step()
            elapsed = clock() - began
            drafter.take()
            if drafter.rows == rows and model_s.calls > before and sample_s.calls == 1:
                steps.append(elapsed)
                models.append(model_s.seconds)
                samples.append(sample_s.seconds)
            sample_s.calls = 0
        drafter.drop(peer)
        drafter.check_integrity()
        del self.model.step
        queue_drafter.choose = sample_s.function
        step, model, sample = (statistics.median(part) * 1e3 for part in (steps, models, samples))
        return {
            "rows": rows,
            "step_ms": step,
            "model_ms": model,
            "sample_ms": sample,
            "drafter_ms": step - model - sample,
            "tokens_per_s": rows / step * 1e3,
        }


class Target:
    """The target in a process of its own, which decodes when it is asked to."""

    def __init__(self, options: argparse.Namespace) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._child = spawn.Process(target=decode_plainly, args=(theirs, options), daemon=True)
        self._child.start()
        theirs.close()
        self._connection.recv()

    def decode(self) -> float:
        """Tokens per second of one request."""
        self._connection.send(None)
        return float(self._connection.recv())

    def close(self) -> None:
        self._connection.close()
        self._child.join()


def decode_plainly(connection: Connection, options: argparse.Namespace) -> None:
    """The process of Target: answers each message with the tokens per second of a greedy decode.

    It inherits this process's cores and number of threads.
    """
    logging.getLogger("sglang").setLevel(logging.ERROR)
    global clock
    if options.cpu_time:
        clock = time.process_time
    import torch

    from sglang_qspec.sidecar.draft_model import DraftModel, DraftModelOptions

    model = DraftModel(
        DraftModelOptions(
            options.target_path,
            dtype=options.dtype,
            device=options.device,
            max_total_tokens=2 * (options.prompt + options.tokens) + 1024,
            context_len=options.prompt + options.tokens + 64,
            mem_fraction=options.mem_fraction,
        )
    )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1000, model.vocab_size, (options.prompt,), generator=generator)
    row = model.open()
    first = int(model.extend([row], [prompt.tolist()])[0].argmax())

    def decode() -> float:
        token, times = first, []
        for _ in range(options.tokens):
            began = clock()
            token = int(model.step([row], [token])[0].argmax())
            times.append(clock() - began)
        model.truncate(row, options.prompt)
        return 1.0 / statistics.median(times)

    decode()
    connection.send("loaded")
    while True:
        try:
            connection.recv()
        except EOFError:
            break
        connection.send(decode())
    # Tearing down torch and SGLang module by module would take seconds.
    os._exit(0)


class Timed:
    """A function that adds up how long it took."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.seconds = 0.0
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        began = clock()
        result = self.function(*args)
        self.seconds += clock() - began
        self.calls += 1
        return result


def msgspec_replace(message: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(message, **changes)


def profile(bench: Bench, rows: int) -> None:
    """Where the time of the passes goes, by operator."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        bench.run(rows)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


def report(
    options: argparse.Namespace,
    model: Any,
    prefill_ms: float,
    rows: list[dict[str, float]],
    plain: float | None,
) -> None:
    print(f"{model.name}, {model.quantization or 'not quantized'}, {model.dtype}, {model.device}")
    print(f"prompts of {options.prompt} tokens, {options.tokens} drafted; medians, in ms")
    print(f"prefill of one prompt: {prefill_ms:.1f}")
    columns = ["rows", "step_ms", "model_ms", "sample_ms", "drafter_ms", "tokens_per_s"]
    if plain is not None:
        print(f"plain decode of the target in {options.dtype}, batch 1: {plain:.1f} tokens/s")
        columns.append("ratio")
    print("".join(f"{name:>14}" for name in columns))
    for row in rows:
        print(f"{row['rows']:>14}" + "".join(f"{row[name]:>14.2f}" for name in columns[1:]))
    eight = next((row for row in rows if row["rows"] == 8), {})
    result = {
        "ratio_8": eight.get("ratio"),
        "drafted_tokens_per_s_8": eight.get("tokens_per_s"),
        "plain_tokens_per_s": plain,
        "rows": rows,
        "prefill_ms": prefill_ms,
        **measured(options, model),
    }
    print(json.dumps(rounded(result)))


def report_load(options: argparse.Namespace, model: Any) -> None:
    """Many requests, then several servers: tables, and a line of JSON."""
    from benchmark.sidecar import servers, submissions

    sizes = {"size": options.prompt, "tokens": options.tokens}
    loads = [
        submissions.measure(model, live, one_prompt=one_prompt, **sizes)
        for one_prompt in (True, False)
        for live in options.live
    ]
    print(
        f"{model.name} on {model.device}, prompts of {options.prompt} tokens, "
        f"{model.total_tokens} tokens of KV"
    )
    print(f"{'live':>8}{'prompts':>12}{'submits/s':>12}{'bookkeeping ms a pass':>24}")
    for load in loads:
        print(
            f"{load['live']:>8}{load['prompts']:>12}{load['submits_per_s']:>12.0f}"
            f"{load['bookkeeping_ms']:>24.2f}"
        )
    shares = [servers.measure(model, count, requests=8, **sizes) for count in options.servers]
    print(f"{'servers':>8}{'light request, ms':>20}{'over alone':>12}")
    for share in shares:
        print(f"{share['servers']:>8}{share['light_ms']:>20.0f}{share['slowdown']:>12.2f}")
    result = {"submissions": loads, "servers": shares, **measured(options, model)}
    print(json.dumps(rounded(result)))


def measured(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """How a result came about."""
    return {
        "prompt_tokens": options.prompt,
        "model": model.name,
        "dtype": model.dtype,
        "command": " ".join(sys.argv),
        "versions": {name: importlib.metadata.version(name) for name in ("sglang", "torch")},
        "clock": "processor time" if options.cpu_time else "wall time",
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, cores {options.cores}",
    }


def rounded(value: Any) -> Any:
    """The same with three decimals in all numbers."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value


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
