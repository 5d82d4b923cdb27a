"""Measures V(b, w) and D(b), the times of verify passes and draft steps in docs/theory.md.

A server with QSPEC and without a draft model measures V: the time between the ends of successive
passes, host work included. The check sets each width on the running server. The server has
`--speculative-qspec-verify tree`, so padding stands for missing drafts. For D a process with the
draft model alone times the steps, as in `bench_sidecar`, so that no other process uses the device.
"""

from __future__ import annotations

import random
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.gpu_check import dummy, standin
from benchmark.gpu_check.outcome import Options, Steps
from benchmark.gpu_check.serving import demo_settings, settings
from benchmark.harness.child import Child
from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.report import Table
from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import state_of, update_settings
from benchmark.harness.statistics import number

WIDTHS = (1, 2, 4, 8, 16)
BATCHES = (1, 8, 32, 64)
DRAFT_ROWS = (1, 8, 32, 64)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 48
LOWEST_ID, HIGHEST_ID = 1000, 40000
NARROWER = 0.05
"""Maximum relative shortfall of the mean width, from passes after the first answers have ended."""
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
    with Configuration(name, chosen, every, chosen.target_cores).server() as server:
        for width in WIDTHS:
            try:
                update_settings(server, {"qspec_draft_token_num": width, "qspec_fixed_width": 1})
            except ServerError as error:
                refused[width] = str(error)[:200]
                continue
            rows += [verify_time(server, batch, width) for batch in batches]
    steps.found.figures[name] = {"rows": rows, "refused_widths": refused}
    steps.found.tables.append(grid(f"V(b, w) of {name}, in ms", rows, batches, refused))
    assert rows, f"the server took no width: {refused}"


def verify_time(server: Server, batch: int, width: int) -> dict[str, float]:
    """The mean milliseconds of a pass over `batch` requests, `width` tokens of each."""
    rng = random.Random(f"{batch} {width}")
    texts = [rng.choices(range(LOWEST_ID, HIGHEST_ID), k=PROMPT_TOKENS) for _ in range(batch)]
    params = {"temperature": 0, "ignore_eos": True}
    before: dict[str, float] = {}
    # The first round is a warm-up. Random weights give repetitive texts, so a wide pass may accept
    # nearly all draft tokens, and more output tokens are needed for the same number of passes.
    for tokens in (8, OUTPUT_TOKENS * max(1, width // 4)):
        before = counters(server)
        asked = {**params, "max_new_tokens": tokens}
        server.post("/generate", {"input_ids": texts, "sampling_params": asked})
    found = {key: value - before[key] for key, value in counters(server).items()}
    passes = found["passes"]
    return {
        "requests": batch,
        "width": width,
        "ms": round(1e3 * found["seconds"] / passes, 3),
        "passes": passes,
        "mean_requests": round(found["requests"] / passes, 2),
        "mean_width": round(found["input_tokens"] / found["requests"], 2),
    }


def counters(server: Server) -> dict[str, float]:
    """Passes, requests, tokens and seconds over all pipelines of a server."""
    pipelines = state_of(server)["pipelines"].values()
    names = ("passes", "requests", "input_tokens", "seconds")
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
    lines: list[list[str]] = []
    with models(options) as (folder, shapes):
        made: dict[str, tuple[str, dict[str, Any]]] = {}
        for shape in shapes:
            path = str(dummy.write(folder, shape))
            made[f"{shape}, bfloat16"] = path, {"load_format": "dummy"}
            if options.on_gpu and _takes_fp8():
                fp8 = {"load_format": "dummy", "quantization": "fp8"}
                made[f"{shape}, fp8"] = path, fp8
        made["demo"] = str(demo_settings(options, "bfloat16", 1).draft_model), {}
        for name, (path, loading) in made.items():
            with steps.check(name):
                child = Child(stepper, path, options.device, loading)
                try:
                    times = [child.ask(count) for count in rows]
                finally:
                    child.shutdown()
                steps.found.figures[name] = dict(zip(map(str, rows), times, strict=True))
                lines.append([name, *(number(round(each["step_ms"], 3)) for each in times)])
    head = ("draft model", *(f"{count} requests" for count in rows))
    steps.found.tables.append(Table("D(b) for one draft token, in ms", head, lines))


def stepper(path: str, device: str, loading: dict[str, Any]) -> Callable[[int], dict[str, float]]:
    """In a child: load a draft model; returns a function that times its steps by rows."""
    from benchmark.bench_sidecar import Bench
    from benchmark.harness.child import draft_model

    sizes = Namespace(prompt=PROMPT_TOKENS, tokens=OUTPUT_TOKENS)
    length = sizes.prompt + sizes.tokens
    total = max(DRAFT_ROWS) * length + 4096
    # On a GPU the draft model may take all free memory.
    place = {
        "dtype": "bfloat16",
        "device": device,
        "mem_fraction": 0.1 if device == "cpu" else None,
        "attention_backend": None if device == "cpu" else _attention_backend(),
    }
    model = draft_model(path, **place, max_total_tokens=total, context_len=length + 64, **loading)
    bench = Bench(model, sizes)
    bench.run(2)
    return bench.run


@contextmanager
def models(options: Options) -> Iterator[tuple[Path, Sequence[str]]]:
    """A folder for dummy models, and the names of their shapes, the target's first."""
    shapes = ("tiny",) if options.emulated or not options.on_gpu else ("llama-8b", "llama-1b")
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        yield Path(folder), shapes


def _attention_backend() -> str | None:
    return standin.BACKEND if standin.import_error() is not None else None


def _takes_fp8() -> bool:
    import torch

    return torch.cuda.get_device_capability() >= FP8_CAPABILITY
