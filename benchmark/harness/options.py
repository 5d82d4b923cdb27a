"""Command line options that benchmarks share: what is wrong with one is said in one sentence."""

from __future__ import annotations

import argparse
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmark.harness.output import say
from sglang_qspec.config import parse_cores


def add_servers(parser: argparse.ArgumentParser) -> None:
    """What is served and where; `check` and `Hardware.of` read it. `--dtype` is the benchmark's."""
    add = parser.add_argument
    add("--model", type=Path, help="the target (default: the demo model)")
    add("--draft-model", type=Path, help="the sidecar's (default: the demo model's 8-bit copy)")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    add("--target-cores", type=cores, help="of a CPU, such as 0-3 (default: the first)")
    add("--sidecar-cores", type=cores, help="of a CPU, such as 4-5 (default: the second)")
    add(
        "--free-gib",
        type=rate,
        default=5.0,
        help="memory that must be available for another server to be started next to those that "
        "wait, in GiB; otherwise one of them is ended first (default: 5)",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Where results go, and whether a run goes on."""
    add = parser.add_argument
    add("--output", type=Path, help="folder of the results (default: a new temporary folder)")
    add("--resume", action="store_true", help="go on with the run in --output")
    add("--report-only", action="store_true", help="report the run in --output as far as it came")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What `add_servers` and `add_output` have read must go together."""
    if (options.model is None) != (options.draft_model is None):
        parser.error("--model and --draft-model go together: they must have one vocabulary")
    if (options.target_cores is None) != (options.sidecar_cores is None):
        parser.error("--target-cores and --sidecar-cores go together")
    if (options.resume or options.report_only) and options.output is None:
        parser.error("--resume and --report-only need the --output of the run")


@dataclass(frozen=True)
class Hardware:
    """The models of a run, and the processors of target and sidecar."""

    model: Path
    draft_model: Path
    on_gpu: bool
    target_cores: tuple[int, ...]
    sidecar_cores: tuple[int, ...]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Hardware:
        """As the options say; the demo models are made if they are not there yet."""
        model, draft_model = options.model, options.draft_model
        if model is None:
            from sglang_qspec.models import demo_models

            say("preparing the demo models (a minute the first time)")
            model, draft_model = demo_models().target, demo_models().draft
        on_gpu = not options.cpu and shutil.which("nvidia-smi") is not None
        target, sidecar = split_cores(on_gpu)
        if options.target_cores is not None:
            target, sidecar = options.target_cores, options.sidecar_cores
        return cls(model, draft_model, on_gpu, target, sidecar)


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return value


def rate(text: str) -> float:
    """A number above 0, or inf."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, or inf")
    return value


def cores(text: str) -> tuple[int, ...]:
    """Processors such as 0-3, in order."""
    try:
        found = parse_cores(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be {error}") from error
    if not found:
        raise argparse.ArgumentTypeError("there must be a processor in it")
    return tuple(sorted(found))


def split_cores(on_gpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(target's, sidecar's) processors: all but the last, and the last, if there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if on_gpu or len(cores) < 2:
        return (), ()
    return tuple(cores[:1]), tuple(cores[1:2])
