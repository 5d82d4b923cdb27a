"""Compares greedy answers of a server without speculation and of a server with QSPEC.

Both servers run in float32, because the last bits of bfloat16 logits depend on the number of rows
in a pass. On GPUs SGLang's attention kernels for float32 are Triton's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from benchmark import demo
from benchmark.gpu_check.outcome import Options, Steps
from benchmark.gpu_check.serving import demo_settings
from benchmark.harness.configuration import Configuration, with_and_without
from benchmark.harness.dataset import render
from benchmark.harness.report import Table
from benchmark.harness.run import Run
from benchmark.harness.speculation import wait_for_sidecar
from benchmark.harness.statistics import number
from benchmark.prompts import PROMPTS

SLOTS = 4
MAX_NEW_TOKENS = 128


def parity(options: Options, steps: Steps) -> None:
    """Compare the answers of both servers to all prompts, token for token."""
    settings = demo_settings(options, "float32", SLOTS)
    prompts = render(settings.model, PROMPTS)
    runs = [serve(each, prompts, options) for each in with_and_without(settings)]
    plain, qspec = runs
    different = [
        place
        for place, (ours, theirs) in enumerate(zip(qspec.answers, plain.answers, strict=True))
        if ours.output_ids != theirs.output_ids
    ]
    steps.found.identical = not different
    steps.found.figures |= {
        "dtype": settings.dtype,
        "answers": len(prompts),
        "different": different,
        "tokens": plain.tokens,
        "accept_len": round(qspec.accept_len, 3),
        "accepted_by_source": dict(qspec.accepted),
        "tokens_per_s": [round(run.tokens_per_s, 1) for run in runs],
    }
    columns = {
        "": lambda run: "QSPEC" if run is qspec else "no speculation",
        "tokens/s": lambda run: number(run.tokens_per_s),
        "accept length": lambda run: run.accept_len,
        "equal answers": lambda _: f"{len(prompts) - len(different)} of {len(prompts)}",
    }
    note = f"{settings.dtype}, {SLOTS} running at once; two runs of a few seconds, so no ratio."
    steps.found.tables.append(Table.of("Greedy parity", runs, columns, note))
    with steps.check("greedy"):
        assert not different, f"{len(different)} of {len(prompts)} answers differ: {different}"
    with steps.check("drafts"):
        assert sum(qspec.accepted.values()) > 0, "no draft token was accepted"


def serve(configuration: Configuration, prompts: Sequence[str], options: Options) -> Run:
    """Send all prompts at once to a new server of the configuration."""
    asked = Namespace(max_new_tokens=16 if options.emulated else MAX_NEW_TOKENS)
    with configuration.server() as server:
        if configuration.has_sidecar:
            wait_for_sidecar(server)
        return demo.serve(server, configuration.name, prompts, asked)[0]
