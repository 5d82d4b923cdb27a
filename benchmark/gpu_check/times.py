"""Measures V(b, w) and D(b), the times of verify passes and draft steps in docs/theory.md.

Both are measured by `sglang_qspec.tools.measure`. A server with QSPEC and without a draft model has
V: the time between the ends of successive passes, host work included. It drafts nothing, and has
`--speculative-qspec-verify tree`, so padding stands for drafts. For D a process with the draft
model alone times the steps, so that no other process uses the device.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.gpu_check import dummy
from benchmark.gpu_check.findings import Options, Steps
from benchmark.gpu_check.serving import capability, demo_settings, settings
from benchmark.harness import standin
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.report import Table
from benchmark.harness.statistics import number
from sglang_qspec.draft_source import SOURCES
from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.complete.client import Client
from sglang_qspec.tools.measure.model_process import ModelOptions, open_model
from sglang_qspec.tools.measure.pass_timer import PassTimer

WIDTHS = (1, 2, 4, 8, 16)
BATCHES = (1, 8, 32, 64)
DRAFT_ROWS = (1, 8, 32, 64)
PROMPT_TOKENS = 128
PROMPT_IDS = range(1000, 40000)
STEP_SECONDS = 2.0
"""Seconds for which the steps with a number of requests are timed."""
NARROWER = 0.05
"""Maximum relative shortfall of the mean width."""
FP8_CAPABILITY = (8, 9)
DUMMY = ("--load-format", "dummy")


def verify_times(options: Options, steps: Steps) -> None:
    """Measure V(b, w) of an 8B shape with dummy weights, and of the demo model."""
    batches = (1, 2) if options.emulated else BATCHES
    slots = max(batches)
    with models(options) as (folder, shapes):
        large = dummy.write(folder, shapes[0])
        demo = demo_settings(options, "bfloat16", slots)
        own = settings(options, large, large, "bfloat16", slots, 2048)
        # No sidecar shares the memory.
        memory = ("--mem-fraction-static", "0.85") if options.on_gpu else ()
        for name, chosen, flags in (
            (shapes[0], own, (*DUMMY, *memory)),
            ("demo", demo, memory),
        ):
            with steps.check(name):
                measure(steps, name, chosen, flags, batches)


def measure(
    steps: Steps, name: str, chosen: Settings, flags: Sequence[str], batches: Sequence[int]
) -> None:
    """Measure V of one model, and leave out the widths that the server refuses."""
    *inner, widest = map(str, WIDTHS)
    trees = ("--speculative-num-draft-tokens", widest, "--speculative-qspec-verify", "tree")
    captured = ("--speculative-qspec-graph-widths", ",".join(inner))
    every = ("--speculative-algorithm", "QSPEC", *trees, *captured, *flags)
    rows: list[dict[str, float]] = []
    refused: dict[int, str] = {}
    rng = random.Random(name)
    texts = [rng.choices(PROMPT_IDS, k=PROMPT_TOKENS) for _ in range(max(batches))]
    with Configuration(name, chosen, every, chosen.target_cores).server() as server:
        client = Client(server.url)
        timer = PassTimer(client)
        # The answers of random weights repeat themselves, so lookups would end them in few passes.
        timer.set(**{f"source_{source}": 0 for source in SOURCES})
        for width in WIDTHS:
            try:
                timer.set(draft_token_num=width, fixed_width=1)
            except QSpecError as error:
                refused[width] = str(error)[:200]
                continue
            rows += [verify_time(client, timer, texts, batch, width) for batch in batches]
    steps.found.figures[name] = {"rows": rows, "refused_widths": refused}
    steps.found.tables.append(grid(f"V(b, w) of {name}, in ms", rows, batches, refused))
    assert rows, f"the server took no width: {refused}"


def verify_time(
    client: Client, timer: PassTimer, texts: Sequence[list[int]], batch: int, width: int
) -> dict[str, float]:
    """The milliseconds of a pass over `batch` requests, `width` tokens of each."""
    before = counters(client)
    seconds = timer.pass_seconds(texts, [(batch, width)])[batch, width]
    found = {name: count - before[name] for name, count in counters(client).items()}
    return {
        "requests": batch,
        "width": width,
        "ms": round(1e3 * seconds, 3),
        "passes": found["passes"],
        "mean_requests": round(found["requests"] / found["passes"], 2),
        "mean_width": round(found["input_tokens"] / found["requests"], 2),
    }


def counters(client: Client) -> dict[str, float]:
    """Passes, requests and tokens over all pipelines of a server."""
    pipelines = client.state()["pipelines"].values()
    names = ("passes", "requests", "input_tokens")
    return {name: sum(counts[name] for counts in pipelines) for name in names}


def grid(
    title: str, rows: Sequence[Mapping[str, float]], batches: Sequence[int], refused: Any
) -> Table:
    """A line for each batch size, a column for each width.

    A server runs a narrower pass where it has no CUDA graph of the width; such cells are empty.
    """
    widths = list(dict.fromkeys(row["width"] for row in rows))
    exact = (row for row in rows if row["mean_width"] > (1 - NARROWER) * row["width"])
    times = {(row["requests"], row["width"]): row["ms"] for row in exact}
    lines = [
        [str(batch), *(number(times.get((batch, width))) for width in widths)] for batch in batches
    ]
    note = f"The server refused the widths {', '.join(map(str, refused))}." if refused else ""
    return Table(title, ("requests", *(f"width {width}" for width in widths)), lines, note)


def draft_times(options: Options, steps: Steps) -> None:
    """Measure D(b): the time of one draft step by requests, of each draft model in turn."""
    rows = (1, 2) if options.emulated else DRAFT_ROWS
    has_stand_ins = options.on_gpu and standin.import_error() is not None
    lines: list[list[str]] = []
    with models(options) as (folder, shapes):
        made: dict[str, tuple[str, dict[str, Any]]] = {}
        for shape in shapes:
            path = str(dummy.write(folder, shape))
            made[f"{shape}, bfloat16"] = path, {"load_format": "dummy"}
            if options.on_gpu and capability() >= FP8_CAPABILITY:
                fp8 = {"load_format": "dummy", "quantization": "fp8"}
                made[f"{shape}, fp8"] = path, fp8
        made["demo"] = str(demo_settings(options, "bfloat16", 1).draft_model), {}
        for name, (path, loading) in made.items():
            with steps.check(name):
                asked = ModelOptions(
                    path=path,
                    device="cuda:0" if options.on_gpu else "cpu",
                    dtype="bfloat16",
                    mem_fraction=0.0 if options.on_gpu else 0.1,
                    attention_backend=standin.BACKEND if has_stand_ins else None,
                    **loading,
                )
                with open_model(name, asked, os.environ.get("CUDA_VISIBLE_DEVICES")) as model:
                    times = [
                        round(1e3 * model.call("pass_seconds", rows=count, seconds=STEP_SECONDS), 3)
                        for count in rows
                    ]
                steps.found.figures[name] = {
                    str(count): {"step_ms": time} for count, time in zip(rows, times, strict=True)
                }
                lines.append([name, *map(number, times)])
    head = ("draft model", *(f"{count} requests" for count in rows))
    steps.found.tables.append(Table("D(b) for one draft token, in ms", head, lines))


@contextmanager
def models(options: Options) -> Iterator[tuple[Path, Sequence[str]]]:
    """A folder for dummy models, and the names of their shapes, the target's first."""
    shapes = ("tiny",) if options.emulated or not options.on_gpu else ("llama-8b", "llama-1b")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        yield Path(folder), shapes
