"""Adds the command line options that benchmarks share."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmark.harness.configuration import Settings
from benchmark.harness.output import say
from sglang_qspec.values import parse_cores

EXACT = "; bfloat16 kernels of different shapes may break ties differently, so outputs differ"
"""The reason for float32 in the help text of `--dtype`."""


def parser_of(
    name: str, doc: str | None, choices: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """The parser of benchmark `name`, described by the first line of its docstring `doc`.

    The help text ends with `choices`: configurations or cases, each with a description.
    """
    shown = "; ".join(f"{choice}: {text}" for choice, text in (choices or {}).items())
    return argparse.ArgumentParser(
        description=(doc or "").split("\n")[0],
        prog=f"python -m benchmark.{name}",
        epilog=shown or None,
    )


def add_servers(parser: argparse.ArgumentParser, dtype: str, dtype_help: str = "") -> None:
    """Add the options of models, dtype and processors; `settings_of` reads them."""
    add = parser.add_argument
    add("--model", type=Path, help="target model (default: the demo model)")
    add("--draft-model", type=Path, help="draft model (default: the demo model's 8-bit copy)")
    add("--dtype", default=dtype, help=f"dtype of the target (default: {dtype}{dtype_help})")
    add("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    add("--target-cores", type=cores, help="processors, such as 0-3 (default: the first)")
    add("--sidecar-cores", type=cores, help="processors, such as 4-5 (default: the second)")
    add("--flags", type=words, default=(), help="more flags of every server, as --flags='--a b'")


def add_run(parser: argparse.ArgumentParser, dtype: str, dtype_help: str = "") -> None:
    """Add the options of `add_servers`, of the results folder, and of resuming a run."""
    add_servers(parser, dtype, dtype_help)
    add = parser.add_argument
    add("--output", type=Path, help="folder of the results (default: a new temporary folder)")
    add("--resume", action="store_true", help="continue the run in --output")
    add("--report-only", action="store_true", help="only report and draw what --output holds")


def add_unpinned(parser: argparse.ArgumentParser) -> None:
    """Add the option `--unpinned`; `settings_of` reads it."""
    text = "pin nothing: every target may use all processors, and QSPEC divides those of a CPU"
    parser.add_argument("--unpinned", action="store_true", help=text)


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Ends the process with a message if shared options conflict."""
    options = parser.parse_args(argv)
    if (options.model is None) != (options.draft_model is None):
        parser.error("--model and --draft-model go together: they must have one tokenizer")
    if (options.target_cores is None) != (options.sidecar_cores is None):
        parser.error("--target-cores and --sidecar-cores go together")
    given = vars(options)
    if given.get("unpinned") and options.target_cores is not None:
        parser.error("--unpinned and --target-cores exclude each other")
    if (given.get("resume") or given.get("report_only")) and given["output"] is None:
        parser.error("--resume and --report-only need the --output of the run")
    # SIGTERM then raises KeyboardInterrupt, so that every server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return options


def settings_of(
    options: argparse.Namespace, slots: int, context_length: int, total_tokens: int | None = None
) -> Settings:
    """The settings by the options of `add_servers`. Makes the demo models if they are missing."""
    model, draft_model = options.model, options.draft_model
    on_gpu = not options.cpu and shutil.which("nvidia-smi") is not None
    if model is None:
        from sglang_qspec.tools.models import demo_models

        say("preparing the demo models (a minute the first time)")
        demo = demo_models(on_cuda=on_gpu)
        model, draft_model = demo.target, demo.draft
    target, sidecar = options.target_cores, options.sidecar_cores
    if target is None:
        unpinned = vars(options).get("unpinned", False)
        target, sidecar = ((), ()) if unpinned else split_cores(on_gpu)
    given = (slots, context_length, on_gpu, target, sidecar, total_tokens, options.flags)
    return Settings(model, draft_model, options.dtype, *given)


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return value


def words(text: str) -> tuple[str, ...]:
    """The words of a shell command line."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


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
        raise argparse.ArgumentTypeError("at least one processor must be given")
    return tuple(sorted(found))


def split_cores(on_gpu: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first processor for the target and the second for the sidecar.

    Both are empty, so nothing is pinned, on a GPU or with a single processor.
    """
    found = sorted(os.sched_getaffinity(0))
    if on_gpu or len(found) < 2:
        return (), ()
    return tuple(found[:1]), tuple(found[1:2])
