"""The command `qspec models compare`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from sglang_qspec import config, values
from sglang_qspec.config import AUTO_CORES
from sglang_qspec.tools import declare
from sglang_qspec.tools.compare.widths import MOST_IN_FLIGHT, WIDTHS
from sglang_qspec.tools.models.prompts import PROMPTS, texts_of

DESCRIPTION = """Measure what draft models would be worth for a target on this machine: how often
they choose the target's next token, greedily and sampled with the same seeds; the time of a draft
step; memory; and the throughput that `qspec theory` predicts from these and from the target's
measured pass times. The target's answers to the prompts serve as texts. Prints tables and a
recommendation."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    add("--target", "the target: a folder, or a name on a hub", metavar="PATH", required=True)
    drafts = "draft models to compare: folders, or names on a hub"
    add("--draft", drafts, metavar="PATH", nargs="+", required=True)
    add(
        "--prompts",
        "file with a `prompt` in each line, or in Spec-Bench's format (default: twelve prompts of "
        "mixed kinds)",
        Path,
        "JSONL",
    )
    add(
        "--in-flight",
        f"requests that are served at once, numbers up to {MOST_IN_FLIGHT} (default: 1 4)",
        values.whole(1, MOST_IN_FLIGHT),
        "N",
        default=[1, 4],
        nargs="+",
    )
    add("--tokens", "maximum length of an answer, in tokens", values.positive, "N", default=64)
    temperature = "temperature of the sampled answers, 0.01 to 2"
    add("--temperature", temperature, values.number(0.01, 2.0), "T", default=0.7)
    device = "device of the target (default: cuda if there is a GPU, otherwise cpu)"
    add("--device", device, choices=tuple(WIDTHS))
    add(
        "--draft-device",
        "device of the draft models: cpu, cuda or cuda:N (default: a server's choice)",
        values.device,
        "DEVICE",
        default="",
    )
    add(
        "--cores",
        "CPUs of the draft model, such as 1 or 2-5, if both are on a CPU; the target has the "
        "others; shared lets both use all (default: auto, which divides them as "
        "--speculative-qspec-cores auto does)",
        config.parser("cores"),
        "CPUS",
        default=AUTO_CORES,
    )
    add("--dtype", "data type of both models' activations", metavar="DTYPE", default="auto")
    add(
        "--draft-quantization",
        "SGLang's quantization method of the draft models, such as fp8 for unquantized ones on a "
        "GPU (default: the checkpoint's)",
        metavar="METHOD",
    )
    declare.switch(parser, "--trust-remote-code", "run code that is part of a checkpoint")
    declare.switch(parser, "--json", "print one line of JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Measure, and return the text to print.

    Raises ConfigError for a file of prompts, a model or CPUs that cannot be used, and QSpecError if
    a server or a draft model does not start.
    """
    from sglang_qspec.tools.compare.comparison import Comparison
    from sglang_qspec.tools.compare.report import recommendation, text_of

    texts = texts_of(options.prompts, PROMPTS)
    comparison = Comparison(options)
    prompts = comparison.prompt_ids(texts)
    candidates = comparison.measure(prompts)
    if not options.json:
        heading = f"{options.target}: {len(prompts)} prompts, {comparison.placement}"
        return text_of(candidates, heading)
    times, in_flight = candidates[0].times, candidates[0].in_flight
    verify = times.passes.measured.items()
    record = {
        "target": options.target,
        "place": str(comparison.placement),
        "prompts": len(prompts),
        "tokens": options.tokens,
        "temperature": options.temperature,
        "plain_ms": {str(b): 1e3 * times.plain(b) for b in in_flight},
        "verify_ms": [{"requests": b, "width": w, "ms": 1e3 * each} for (b, w), each in verify],
        "candidates": [candidate.record() for candidate in candidates],
        "recommendation": recommendation(candidates),
    }
    return json.dumps(record)
