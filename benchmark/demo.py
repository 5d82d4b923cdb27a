"""The main job, small: the same queue of prompts without speculation and with QSPEC.

Twelve prompts arrive at once at a server with few running slots, so most of them wait. Two servers
run in turn, with the same settings but for the speculation; on a machine with several cores the
target has its own in both, and the sidecar another.

Prints a table, one answer, and a last line of JSON with `identical`, `speedup` and `accept_len`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from benchmark.harness.dataset import render
from benchmark.harness.options import split_cores
from benchmark.harness.output import say
from benchmark.harness.server import Server
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.prompts import PROMPTS
from sglang_qspec.models import demo_models


@dataclass(frozen=True)
class Run:
    """One server's answers to all prompts. Times are in seconds."""

    name: str
    answers: tuple[dict[str, Any], ...]
    seconds: float
    latencies: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return sum(answer["meta_info"]["completion_tokens"] for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def output_ids(self) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.answers]

    @property
    def accept_len(self) -> float:
        """Tokens per target pass after the prompt's, over all requests; 1.0 without speculation."""
        records = [a["meta_info"] for a in self.answers if "qspec" in a["meta_info"]]
        passes = sum(record["qspec"]["passes"] for record in records)
        tokens = sum(record["completion_tokens"] - 1 for record in records)
        return tokens / passes if passes else 1.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    on_gpu = not options.cpu and shutil.which("nvidia-smi") is not None
    say("preparing the demo models (a minute the first time)")
    models = demo_models()
    target_cores, sidecar_cores = ((), ()) if options.unpinned else split_cores(on_gpu)
    common = common_arguments(options, on_gpu)
    environment = {} if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"}
    speculation = [
        "--speculative-algorithm",
        "QSPEC",
        "--speculative-draft-model-path",
        str(models.draft),
        "--speculative-qspec-completions",
        str(options.completions),
    ]
    speculation += options.arguments
    if sidecar_cores:
        speculation += ["--speculative-qspec-cores", ",".join(map(str, sidecar_cores))]
    prompts = render(models.target, PROMPTS)
    runs = []
    for name, extra in (("no speculation", []), ("QSPEC", speculation)):
        say(f"starting SGLang, {name}")
        with Server(
            models.target, [*common, *extra], cores=target_cores, environment=environment
        ) as server:
            if extra:
                wait_for_sidecar(server)
            runs.append(serve(server, name, prompts, options))
    report(runs, options)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="demo")
    parser.add_argument("--slots", type=int, default=2, help="requests that run at once")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--completions", type=int, default=8, help="drafted of each prompt")
    parser.add_argument("--rounds", type=int, default=1, help="passes over the prompts; medians")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="of the target; float32 makes the comparison of outputs exact, since bfloat16 "
        "kernels of different shapes may break ties differently",
    )
    parser.add_argument(
        "--unpinned", action="store_true", help="let target and sidecar share all cores of a CPU"
    )
    parser.add_argument(
        "arguments", nargs="*", help="more arguments of the QSPEC server alone, after --"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    return parser.parse_args(argv)


def common_arguments(options: argparse.Namespace, on_gpu: bool) -> list[str]:
    """Settings of both servers."""
    arguments = ["--dtype", options.dtype, "--max-running-requests", str(options.slots)]
    arguments += ["--log-level", "warning", "--context-length", "2048"]
    if on_gpu:
        return [*arguments, "--mem-fraction-static", "0.5"]
    return [*arguments, "--device", "cpu", "--max-total-tokens", "16384"]


def serve(server: Server, name: str, prompts: Sequence[str], options: argparse.Namespace) -> Run:
    """Send all prompts at once, `rounds` times, and keep the round of median duration."""
    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
    server.post("/generate", {"text": "Hello", "sampling_params": dict(sampling, max_new_tokens=8)})
    rounds = []
    for _ in range(options.rounds):
        server.post("/flush_cache?timeout=10", {})
        rounds.append(serve_once(server, name, prompts, sampling))
    rounds.sort(key=lambda run: run.seconds)
    return rounds[(len(rounds) - 1) // 2]


def serve_once(server: Server, name: str, prompts: Sequence[str], sampling: dict[str, Any]) -> Run:
    started = time.monotonic()
    answers: dict[int, dict[str, Any]] = {}
    latencies: dict[int, float] = {}

    def ask(index: int) -> int:
        body = {"text": prompts[index], "sampling_params": sampling}
        answers[index] = server.post("/generate", body)
        latencies[index] = time.monotonic() - started
        return index

    with ThreadPoolExecutor(len(prompts)) as pool:
        pending = [pool.submit(ask, index) for index in range(len(prompts))]
        for done, future in enumerate(as_completed(pending), 1):
            tokens = answers[future.result()]["meta_info"]["completion_tokens"]
            say(f"  {name}: {done}/{len(prompts)} done, {tokens} tokens", end="\r")
    say("")
    seconds = time.monotonic() - started
    order = range(len(prompts))
    return Run(name, tuple(answers[i] for i in order), seconds, tuple(latencies[i] for i in order))


def report(runs: Sequence[Run], options: argparse.Namespace) -> None:
    plain, spec = runs
    identical = plain.output_ids == spec.output_ids
    print(f"\n{'':16} {'tokens/s':>9} {'mean latency':>13} {'accept length':>14} {'output':>10}")
    for run in runs:
        same = "" if run is plain else ("identical" if identical else "different")
        print(
            f"{run.name:16} {run.tokens_per_s:9.1f} {statistics.mean(run.latencies):11.2f} s "
            f"{run.accept_len:14.2f} {same:>10}"
        )
    sources: dict[str, int] = {}
    for answer in spec.answers:
        for source, count in answer["meta_info"]["qspec"]["accepted_by_source"].items():
            sources[source] = sources.get(source, 0) + count
    print("accepted draft tokens by source: " + ", ".join(f"{s} {n}" for s, n in sources.items()))
    print(f"\n{PROMPTS[0]}\n> " + spec.answers[0]["text"].strip().replace("\n", "\n> ") + "\n")
    speedup = spec.tokens_per_s / plain.tokens_per_s
    print(
        json.dumps(
            {
                "identical": identical,
                "speedup": round(speedup, 3),
                "accept_len": round(spec.accept_len, 3),
                "latency_ratio": round(
                    statistics.mean(spec.latencies) / statistics.mean(plain.latencies), 3
                ),
                "tokens_per_s": [round(run.tokens_per_s, 1) for run in runs],
                "slots": options.slots,
                "completions": options.completions,
                "dtype": options.dtype,
            }
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
