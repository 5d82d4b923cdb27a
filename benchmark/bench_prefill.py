"""Compares prefills that verify drafts with prefills that do not, on one server.

    python -m benchmark.bench_prefill --rounds 5

One server with the demo models answers the demo prompts, with the runtime setting `prefill_drafts`
off and on in turn (A B A B). There are two cases:

- `guesses`: prompts are sent one after another, and each request has its own answer as a guess;
- `queue`: all prompts are sent at once, and the sidecar drafts while requests wait.

Answers are streamed. The time to the first 32 tokens of an answer counts from sending the request.

Prints a table of medians, and ends with a line of JSON: `rows`, each with `case`, `prefill_drafts`,
`passes` for an answer, `seconds_to_32`, `seconds` of an answer, and `identical`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from benchmark.harness.dataset import render
from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from sglang_qspec.tools.models import demo_models

FIRST = 32
"""The benchmark measures the time to this number of tokens of an answer."""


@dataclass
class Found:
    """Figures of one case, one item for each answer, or for each round."""

    passes: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    models = demo_models()
    prompts = render(models.target, PROMPTS[: options.prompts])
    sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
    cores = sorted(os.sched_getaffinity(0))
    arguments = [
        *("--device", "cpu", "--max-running-requests", "2", "--context-length", "2048"),
        *("--max-total-tokens", "16384", "--log-level", "warning", "--disable-radix-cache"),
        *("--dtype", "float32", "--speculative-algorithm", "QSPEC"),
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores[-1])),
    ]
    found: dict[tuple[str, int], Found] = {}
    identical = True
    with Server(models.target, arguments, cores=cores[:1], pinned_from_start=True) as server:
        plain = [
            ask(server, text, {**sampling, "custom_params": {"qspec_enabled": False}})
            for text in prompts
        ]
        for round_ in range(options.rounds + 1):
            for case in ("guesses", "queue"):
                for on in (0, 1) if round_ % 2 else (1, 0):
                    values = {"server_args": {"qspec_prefill_drafts": on}}
                    server.post("/set_internal_state", values)
                    answers = serve(server, prompts, sampling, case, [p["text"] for p in plain])
                    identical &= all(
                        answer["ids"] == own["ids"]
                        for answer, own in zip(answers, plain, strict=True)
                    )
                    if round_:  # the first round learns the times of passes
                        figures = found.setdefault((case, on), Found())
                        figures.passes.append(mean(a["passes"] for a in answers))
                        figures.first.append(mean(a["first"] for a in answers))
                        figures.whole.append(mean(a["whole"] for a in answers))
    rows = [
        {
            "case": case,
            "prefill_drafts": bool(on),
            "passes": round(median(figures.passes), 2),
            "seconds_to_32": round(median(figures.first), 3),
            "seconds": round(median(figures.whole), 3),
        }
        for (case, on), figures in sorted(found.items())
    ]
    for row in rows:
        print(row)
    print(json.dumps({"name": "bench_prefill", "rows": rows, "identical": identical}))
    return 0 if identical else 1


def serve(
    server: Server, prompts: list[str], sampling: dict[str, Any], case: str, answers: list[str]
) -> list[dict[str, Any]]:
    """Answers to all prompts: one after another with guesses, or all at once without."""
    if case == "guesses":
        return [
            ask(server, text, {**sampling, "custom_params": {"qspec_guesses": [guess]}})
            for text, guess in zip(prompts, answers, strict=True)
        ]
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda text: ask(server, text, sampling), prompts))


def ask(server: Server, text: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """One streamed answer with the times of its first tokens and of its end, in seconds."""
    body = {"text": text, "sampling_params": sampling, "stream": True}
    began = time.monotonic()
    first: float | None = None
    last: dict[str, Any] = {}
    for piece in server.stream("/generate", body):
        last = piece
        if first is None and piece["meta_info"]["completion_tokens"] >= FIRST:
            first = time.monotonic() - began
    whole = time.monotonic() - began
    passes = last["meta_info"].get("qspec", {}).get("passes", 0)
    return {
        "ids": last["output_ids"],
        "text": last["text"],
        "passes": passes,
        "first": whole if first is None else first,
        "whole": whole,
    }


if __name__ == "__main__":
    raise SystemExit(main())
