"""The main job, small: the same queue of prompts without speculation and with QSPEC.

Twelve prompts arrive at once at a server with few running slots, so most of them wait. Two servers
run one after another, with the same settings but for the speculation; on a machine with several
cores the target has its own core in both, and the sidecar another.

Prints a table, one answer, and a last line of JSON with `identical`, `speedup` and `accept_len`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from tqdm import tqdm

from benchmark.harness.configuration import Settings, with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.options import split_cores
from benchmark.harness.output import say
from benchmark.harness.report import Table
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import Raw, read_answer
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.harness.statistics import Medians, Ratio, number, ratio_record
from benchmark.prompts import PROMPTS
from sglang_qspec.models import demo_models

TOTAL_TOKENS = 16384


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    on_gpu = not options.cpu and shutil.which("nvidia-smi") is not None
    say("preparing the demo models (a minute the first time)")
    models = demo_models()
    cores = ((), ()) if options.unpinned else split_cores(on_gpu)
    settings = Settings(
        *(models.target, models.draft, options.dtype, options.slots, 2048, on_gpu, *cores),
        total_tokens=TOTAL_TOKENS,
    )
    prompts = render(models.target, PROMPTS)
    rounds: list[dict[int, Run]] = []
    completions = ("--speculative-qspec-completions", str(options.completions))
    for configuration in with_and_without(settings, *completions, *options.arguments):
        say(f"starting SGLang, {configuration.name}")
        with configuration.server() as server:
            if configuration.has_sidecar:
                wait_for_sidecar(server)
            found, texts = serve(server, configuration.name, prompts, options)
            rounds.append(found)
    report(rounds, texts[0], options)
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


def serve(
    server: Server, name: str, prompts: Sequence[str], options: argparse.Namespace
) -> tuple[dict[int, Run], list[str]]:
    """All prompts at once, `rounds` times: the run of each round, and the texts of the last one."""
    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
    server.post("/generate", {"text": "Hello", "sampling_params": dict(sampling, max_new_tokens=8)})
    rounds: dict[int, Run] = {}
    for number_of_round in range(options.rounds):
        server.post("/flush_cache?timeout=10", {})
        began = time.monotonic()
        raw = serve_once(server, name, prompts, sampling)
        seconds = time.monotonic() - began
        rounds[number_of_round] = Run(seconds, tuple(read_answer(one, s) for one, s in raw))
    return rounds, [one["text"] for one, _ in raw]


def serve_once(
    server: Server, name: str, prompts: Sequence[str], sampling: dict[str, Any]
) -> list[tuple[Raw, float]]:
    """The answers in the order of the prompts, each with its seconds from the start."""
    began = time.monotonic()

    def ask(prompt: str) -> tuple[Raw, float]:
        answer = server.post("/generate", {"text": prompt, "sampling_params": sampling})
        return answer, time.monotonic() - began

    with ThreadPoolExecutor(len(prompts)) as pool:
        pending = [pool.submit(ask, prompt) for prompt in prompts]
        for _ in tqdm(as_completed(pending), name, len(pending), unit="answer"):
            pass
    return [future.result() for future in pending]


def report(rounds: Sequence[dict[int, Run]], text: str, options: argparse.Namespace) -> None:
    plain, qspec = rounds
    medians = [Medians(tuple(runs.values())) for runs in rounds]
    identical = all(
        [a.output_ids for a in plain[n].answers] == [a.output_ids for a in qspec[n].answers]
        for n in plain
    )
    speedup = Ratio.of(qspec, plain)
    assert speedup is not None
    same = "identical" if identical else "different"
    head = ["", "tokens/s", "speedup", "mean latency (s)", "accept length", "output"]
    lines = [
        [name, f"{m.tokens_per_s:.1f}", ratio, number(m.latency_mean), number(m.accept_len), output]
        for name, m, ratio, output in zip(
            ("no speculation", "QSPEC"), medians, ("", str(speedup)), ("", same), strict=True
        )
    ]
    print("\n" + Table(f"{len(PROMPTS)} prompts", head, lines).text())
    accepted = medians[1].runs[-1].accepted
    print("accepted draft tokens by source: " + ", ".join(f"{s} {n}" for s, n in accepted.items()))
    print(f"\n{PROMPTS[0]}\n> " + text.strip().replace("\n", "\n> ") + "\n")
    record = {
        "identical": identical,
        **ratio_record("speedup", speedup),
        "accept_len": round(medians[1].accept_len, 3),
        "latency_ratio": round(medians[1].latency_mean / medians[0].latency_mean, 3),
        "tokens_per_s": [round(found.tokens_per_s, 1) for found in medians],
        "slots": options.slots,
        "completions": options.completions,
        "dtype": options.dtype,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    raise SystemExit(main())
