"""Runs the parts that are tests of the suite, by pytest in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmark.gpu_check.environment import ROOT
from benchmark.gpu_check.findings import Options, Steps

KERNELS = (
    "test/verify/test_on_device.py",
    "test/verify/test_gumbel_triton.py::test_the_kernels_draw_what_the_cpu_draws",
    "test/verify/test_likeliest.py",
    "test/verify/test_penalties.py",
    "test/test_transfers.py",
    "test/engine/passes/test_trees_on_device.py",
    "test/benchmark/gpu_check/test_stand_ins.py::test_the_stand_ins_agree_with_sgl_kernel",
)
"""Tests that compare the device with the CPU, or with values that plain Python computes."""
MOCKED = (
    "test/verify/test_devices.py",
    "test/engine/passes/test_fake_cuda.py",
    "test/engine/passes/test_fake_launch.py",
    "test/engine/test_gpu_defaults.py",
    "test/benchmark/test_server_flags.py",
)
"""Tests that need no GPU and check the work that a server would give to a GPU."""
DISTRIBUTION = "test/engine/passes/test_distribution.py"


def kernels(options: Options, steps: Steps) -> None:
    """Run the tests of kernels and tensor code on the device."""
    run(steps, [*KERNELS, "--device", options.device])


def mocked(_options: Options, steps: Steps) -> None:
    """Run the tests with fake CUDA tensors and mocked GPUs, which need no real one."""
    # The user's choice of real GPUs would change the placement on mocked ones.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    run(steps, MOCKED, {"SGLANG_USE_CPU_ENGINE": "1"})


def distribution(options: Options, steps: Steps) -> None:
    """Run the distribution suite with the toy target's passes on the device."""
    run(steps, [DISTRIBUTION, "--device", options.device])


def run(steps: Steps, arguments: Sequence[str], environment: Mapping[str, str] = {}) -> None:
    """Run tests; a failed one is a failed check. Records counts and the smallest p-value.

    Raises RuntimeError if pytest itself fails.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        report = Path(folder) / "report.xml"
        # The tests import the package of this process, which need not be the one of the checkout.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-o", "pythonpath=", f"--junitxml={report}", *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output = done.stdout
        print(output, flush=True)  # for the log of the part
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}: {_cause(output)}")
        read(steps, ElementTree.parse(report).getroot())


def _cause(output: str) -> str:
    """The lines of pytest's output that name an error, or else its last line."""
    lines = output.strip().splitlines() or [""]
    return "; ".join(line for line in lines if line.startswith(("E  ", "ERROR:"))) or lines[-1]


def read(steps: Steps, report: ElementTree.Element) -> None:
    """Record the results of a junit report."""
    probabilities: list[float] = []
    for case in report.iter("testcase"):
        name = case.get("name", "")
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
            steps.found.failed[name] = problem.get("message", "")[:300]
        elif (left_out := case.find("skipped")) is not None:
            steps.found.skipped[name] = left_out.get("message", "")
        else:
            steps.found.passed.append(name)
        for line in case.iter("property"):
            probabilities += map(float, re.findall(r"\bp=(\S+)", line.get("value", "")))
    counts = {"passed": len(steps.found.passed), "skipped": len(steps.found.skipped)}
    steps.found.figures |= counts
    if probabilities:
        steps.found.figures["smallest_p"] = min(probabilities)
    if not steps.found.passed:
        raise RuntimeError("no test has passed")
