"""Lists the parts of the check in the order in which they run; the basic parts come first."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A part of the check: the function `name` of a module, which takes Options and Steps."""

    name: str
    module: str
    seconds: int
    """Time limit on a GPU."""
    text: str
    not_emulated: str = ""
    """Why `--emulate` runs the part only if it is named; empty if it always runs."""
    counts: bool = True
    """Whether the total limit includes the time of the part."""


_HERE = "benchmark.gpu_check"
_SERVED = "starts servers; the test suite runs this on a CPU ({})"

PARTS = (
    Part("environment", f"{_HERE}.environment", 60, "GPU, driver, torch, CUDA toolkit, sgl_kernel"),
    Part(
        "compilation",
        f"{_HERE}.loads",
        900,
        "first servers of each dtype, for which SGLang and FlashInfer compile their kernels",
        "a CPU compiles nothing",
        counts=False,
    ),
    Part("kernels", f"{_HERE}.pytests", 300, "tests of kernels and tensor code, on the device"),
    Part(
        "mocked",
        f"{_HERE}.pytests",
        300,
        "tests with fake CUDA tensors and mocked GPUs, flags, defaults",
    ),
    Part(
        "distribution",
        f"{_HERE}.pytests",
        180,
        "the distribution of sampled texts of a toy target",
        "the test suite runs it on a CPU (test/engine/passes/test_distribution.py)",
    ),
    Part(
        "parity",
        f"{_HERE}.loads",
        300,
        "greedy answers with and without QSPEC, in float32",
    ),
    Part(
        "passes",
        f"{_HERE}.passes",
        360,
        "share of passes in CUDA graphs, and sampled answers, of mixed requests in bfloat16",
    ),
    Part(
        "plain_times",
        f"{_HERE}.plain",
        240,
        "time of a decode step without drafts, with and without QSPEC, of an 8B model",
        _SERVED.format("benchmark/bench_overhead.py measures the host's part"),
    ),
    Part(
        "speedup",
        f"{_HERE}.speedup",
        420,
        "tokens/s with and without QSPEC, of demo models padded to 8 and 0.5 billion parameters",
        _SERVED.format("bench_peers measures speedups"),
    ),
    Part(
        "verify_times",
        f"{_HERE}.times",
        300,
        "V(b, w): time of a pass by requests and width, of an 8B model and the demo model",
        _SERVED.format("bench_peers --pipelines measures V"),
    ),
    Part(
        "draft_times",
        f"{_HERE}.times",
        240,
        "D(b): time of a draft step by requests, of an 8B model and the demo's draft model",
        "loads models; `qspec models compare` measures D",
    ),
    Part(
        "queue",
        f"{_HERE}.loads",
        240,
        "bench_queue in small",
        _SERVED.format("test/benchmark/test_bench_queue.py"),
    ),
    Part(
        "worst_case",
        f"{_HERE}.loads",
        240,
        "bench_worst_case in small",
        _SERVED.format("test/benchmark/test_commands.py"),
    ),
)
BY_NAME = {part.name: part for part in PARTS}
