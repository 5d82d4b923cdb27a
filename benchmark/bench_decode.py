"""Measures how close decode passes come to the time in which their weights can be read.

    python -m benchmark.bench_decode

A decode pass over few rows reads all weights once, and computes little for each of them. So the
read bandwidth of the memory is its limit. On the target's cores, and on all cores, this benchmark
measures

- the bandwidth: the sum of an array that is larger than every cache, by one thread for each core;
- decode passes of the target, and of the draft model as a sidecar runs it, over 1 to 16 rows of 128
  tokens of context. A pass includes the choice of the likeliest tokens, and no scheduler.

Both take turns in each round, because a shared machine changes its speed. The bytes of a pass are
those of the weights in the form that the CPU backend reads, without KV; `weight_bytes` says how
they are counted. The last line is JSON: `rows`, each with `model`, `cores`, `rows`, `pass_ms`,
`bandwidth` in GB/s, and `share`, the time of the read over that of the pass; `share_target` and
`share_draft` are the smallest shares of passes over one row.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from safetensors import safe_open

from benchmark.harness.options import add_servers, parsed, parser_of, positive, settings_of
from benchmark.harness.output import print_record, say
from benchmark.harness.report import Table, fields
from benchmark.harness.statistics import rounded
from sglang_qspec.tools.measure.model_process import ModelOptions, open_model

ROWS = (1, 2, 4, 8, 16)
SECONDS = 0.7
"""Time of a measurement of passes over one number of rows."""
MEM_FRACTION = 0.08
VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Size of a value by the dtype of the target."""
READER = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
array = torch.ones(int(sys.argv[2]) // 4)
for _ in sys.stdin:
    found = []
    for _ in range(4):
        began = time.perf_counter()
        array.sum()
        found.append(time.perf_counter() - began)
    print(array.nbytes / min(found) / 1e9, flush=True)
"""
"""A process that answers each line with the read bandwidth in GB/s."""
COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    **fields("model", "cores", "rows"),
    "ms": itemgetter("pass_ms"),
    "GB/s": itemgetter("bandwidth"),
    "share": lambda row: f"{row['share']:.0%}",
}


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the weights that a decode pass reads, for a target in `dtype`.

    The embedding table counts once, as the LM head, with one byte a value if the other weights are
    quantized. Vectors, such as scales for each channel, do not count.
    """
    shapes: dict[str, tuple[list[int], str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                part = file.get_slice(name)
                shapes[name] = (part.get_shape(), part.get_dtype())
    is_quantized = any(name.endswith("qweight") for name in shapes)
    head = next((name for name in shapes if name.startswith("lm_head")), None)
    total, width = 0, VALUE_BYTES[dtype]
    for name, (shape, stored) in shapes.items():
        values = math.prod(shape)
        if name.endswith("qweight"):
            total += values * (4 if stored == "I32" else 1)
        elif len(shape) == 2 and name.endswith(".weight"):
            if "embed_tokens" in name and head is not None:
                continue
            is_head = name == head or "embed_tokens" in name
            total += values * (1 if is_quantized and is_head else width)
    return total


@contextlib.contextmanager
def bandwidth_of(cores: str, size: int = 2**30) -> Iterator[Callable[[], float]]:
    """Start a process that reads memory on `cores`, such as `0,1`.

    Yields a function that measures the bandwidth in GB/s: the best of four reads of `size` bytes.
    """
    threads = str(len(cores.split(",")))
    command = ["taskset", "-c", cores, sys.executable, "-c", READER, threads, str(size)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None
        assert answers is not None

        def measure() -> float:
            print(file=questions, flush=True)
            return float(answers.readline())

        try:
            yield measure
        finally:
            process.kill()


def passes_of(name: str, options: ModelOptions, rounds: int) -> Iterator[Mapping[str, Any]]:
    """The measurements of one model on some cores, a row for each number of rows."""
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    read: list[float] = []
    size = weight_bytes(Path(options.path), options.dtype)
    with open_model(name, options, None) as model, bandwidth_of(options.cores) as bandwidth:
        for _ in range(rounds):
            read.append(bandwidth())
            for rows, seconds in found.items():
                seconds.append(model.call("pass_seconds", rows=rows, seconds=SECONDS))
    for rows, seconds in found.items():
        shares = [size / (each * 1e9) / one for each, one in zip(read, seconds, strict=True)]
        yield {
            "model": name,
            "cores": options.cores,
            "rows": rows,
            "pass_ms": 1e3 * median(seconds),
            "bandwidth": median(read),
            "share": median(shares),
            "shares": shares,
        }


def main() -> None:
    parser = parser_of("bench_decode", __doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="figures are their medians")
    add_servers(parser, "bfloat16")
    options = parsed(parser, None)
    if options.dtype not in VALUE_BYTES:
        parser.error(f"--dtype: {options.dtype!r} is not one of {', '.join(VALUE_BYTES)}")
    settings = settings_of(options, max(ROWS), 1024)
    if not settings.target_cores:
        parser.error("this needs two processors, and --cpu on a machine with a GPU")
    own, everything = settings.target_cores, settings.target_cores + settings.sidecar_cores
    rows: list[Mapping[str, Any]] = []
    for cores in dict.fromkeys((own, everything)):
        for name, path in (("target", settings.model), ("draft", settings.draft_model)):
            listed = ",".join(map(str, cores))
            say(f"{name} on {listed}")
            one = ModelOptions(
                path=str(path),
                device="cpu",
                cores=listed,
                dtype=settings.dtype,
                target=name == "target",
                mem_fraction=MEM_FRACTION,
                rows=max(ROWS),
            )
            rows += passes_of(name, one, options.rounds)
    print("\n" + Table.of(f"{settings.dtype} target", rows, COLUMNS).text())
    shares = {
        f"share_{name}": min(r["share"] for r in rows if (r["model"], r["rows"]) == (name, 1))
        for name in ("target", "draft")
    }
    print_record(rounded({"rows": rows, **shares}, 3))


if __name__ == "__main__":
    main()
