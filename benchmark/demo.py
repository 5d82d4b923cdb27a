"""The main job, small: the same queue of prompts without speculation and with QSPEC.

Twelve prompts arrive at once at a server with few running slots, so most of them wait. Two servers
run one after the other, with the same settings except for speculation. On a machine with several
cores the target has its own core in both, and the sidecar another.

Prints a table, one answer, and a last line of JSON with `identical`, `speedup` and `accept_len`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmark.harness.configuration import with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.options import add_servers, parsed, positive, settings_of
from benchmark.harness.output import say
from benchmark.harness.report import Table
from benchmark.harness.run import Run
from benchmark.harness.server import Server
from benchmark.harness.serving import read_answer, send_each, warm_up
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.harness.statistics import Medians, Ratio, number, ratio_record
from benchmark.prompts import PROMPTS

TOTAL_TOKENS = 16384


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = settings_of(options, options.slots, 2048, TOTAL_TOKENS)
    if options.unpinned:
        settings = replace(settings, target_cores=(), sidecar_cores=())
    prompts = render(settings.model, PROMPTS)
    rounds: list[dict[int, Run]] = []
    completions = ("--speculative-qspec-completions", str(options.completions))
    for configuration in with_and_without(settings, *completions, *options.arguments):
        say(f"starting SGLang, {configuration.name}")
        with configuration.server() as server:
            if configuration.has_sidecar:
                wait_for_sidecar(server)
            found, text = serve(server, configuration.name, prompts, options)
            rounds.append(found)
    report(rounds, text, options)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="demo")
    add = parser.add_argument
    add("--slots", type=positive, default=2, help="requests that run at once (default: 2)")
    add("--max-new-tokens", type=positive, default=128, help="maximum output (default: 128)")
    add("--completions", type=positive, default=8, help="drafted per prompt (default: 8)")
    add("--rounds", type=positive, default=1, help="figures are medians (default: 1)")
    add("--unpinned", action="store_true", help="target and sidecar share all cores of a CPU")
    add("arguments", nargs="*", help="more flags of the QSPEC server, after --")
    add_servers(
        parser,
        "float32",
        "; bfloat16 kernels of different shapes may break ties differently, so outputs differ",
    )
    return parsed(parser, argv)


def serve(
    server: Server, name: str, prompts: Sequence[str], options: argparse.Namespace
) -> tuple[dict[int, Run], str]:
    """Serve all prompts at once, `rounds` times; returns the runs and the first prompt's answer."""
    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
    warm_up(server, 1, sampling)
    rounds: dict[int, Run] = {}
    for number_of_round in range(options.rounds):
        server.post("/flush_cache?timeout=10", {})
        began = time.monotonic()
        sent = send_each(server, prompts, sampling, title=name)
        seconds = time.monotonic() - began
        answers = map(read_answer, sent.raw, sent.latencies or ())
        rounds[number_of_round] = Run(seconds, tuple(answers))
    return rounds, sent.raw[0]["text"]


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
