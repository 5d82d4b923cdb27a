"""The command `qspec theory`: a table of the pipelines, or the model fitted to a measured run."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_qspec.errors import TheoryError, shown
from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.pipelines import estimates
from sglang_qspec.tools.theory import plot
from sglang_qspec.tools.theory.fit import Comparison, Fit, compare, fit
from sglang_qspec.tools.theory.rows import read_rows
from sglang_qspec.tools.theory.table import aligned

NEEDED = ("alpha", "k", "verify_ms", "draft_ms", "in_flight")
"""Options that the table of the pipelines requires."""
FIGURES = (*NEEDED, "plain_ms", "lookahead", "again")
"""Options that only the table of the pipelines takes."""
AGAIN = 0.5
"""Default of --again."""
DESCRIPTION = """Print the expected tokens per pass, time per round and speedup of each pipeline,
from the agreement of target and drafter and the times of both. With --fit, fit the model to a run
of benchmark.bench_batch_parallel and compare it with the measurements. docs/theory.md has the
model. A time is a number of milliseconds, or a list of requests:milliseconds such as 1:30,8:45,
with linear interpolation between."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "--alpha",
        type=_number(0.0, 1.0),
        metavar="A",
        help="probability that target and drafter agree on a token, 0 to 1",
    )
    add(
        "--k",
        type=_count,
        metavar="N",
        help="number of draft tokens that a pass verifies for each request",
    )
    add("--verify-ms", type=_milliseconds, metavar="MS", help="time of a pass of width k + 1")
    add(
        "--plain-ms",
        type=_milliseconds,
        metavar="MS",
        help="time of a plain decode pass, width 1 (default: the time of --verify-ms)",
    )
    add("--draft-ms", type=_milliseconds, metavar="MS", help="time of drafting k tokens")
    add(
        "--in-flight",
        type=_count,
        metavar="N",
        help="number of requests that are served at once",
    )
    add(
        "--lookahead",
        type=_count,
        metavar="N",
        help="maximum length of a draft of ahead after the committed tokens (default: 2k + 1)",
    )
    add(
        "--again",
        type=_number(0.0, 1.0),
        metavar="P",
        help="probability that a text without a matching queue draft matches one at the next pass, "
        f"for queue (default: {AGAIN})",
    )
    add("--fit", type=Path, metavar="RESULTS", help="results.json of a run to fit the model to")
    add("--plot", type=Path, metavar="PNG", help="file for a plot of the prediction (with --fit)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print. Raises TheoryError if options are missing or exclude each other."""
    if options.fit is not None:
        given = [_flag(name) for name in FIGURES if getattr(options, name) is not None]
        if given:
            raise TheoryError(
                f"{', '.join(given)} cannot be given with --fit, which takes its figures from the "
                "measured run"
            )
        return _fitted(options)
    if options.plot is not None:
        raise TheoryError(f"--plot is {options.plot}, but is allowed with --fit only")
    missing = [_flag(name) for name in NEEDED if getattr(options, name) is None]
    if missing:
        raise TheoryError(f"{', '.join(missing)} must be given, unless --fit is given")
    if options.lookahead is not None and options.lookahead < options.k:
        raise TheoryError(
            f"--lookahead is {options.lookahead}, but must be at least --k, {options.k}"
        )
    return _pipelines(options)


def _pipelines(options: argparse.Namespace) -> str:
    plain = options.plain_ms or options.verify_ms
    found = estimates(
        options.alpha,
        options.k,
        options.in_flight,
        lambda b, width: (plain if width == 1 else options.verify_ms)(b) / 1e3,
        lambda b: options.draft_ms(b) / 1e3,
        lookahead=options.lookahead,
        again=AGAIN if options.again is None else options.again,
    )
    none, sequential = found["none"].rate, found["sequential"].rate
    rows = [
        (
            name,
            f"{estimate.tokens:.2f}",
            f"{1e3 * estimate.seconds:.1f}",
            f"{estimate.rate:.1f}",
            f"{estimate.rate / none:.2f}",
            f"{estimate.rate / sequential:.2f}",
        )
        for name, estimate in found.items()
    ]
    head = ("predicted", "tokens/pass", "round ms", "tokens/s", "x none", "x sequential")
    return aligned([head, *rows])


def _fitted(options: argparse.Namespace) -> str:
    rows = read_rows(options.fit)
    model = fit(rows)
    compared = compare(model, rows)
    if options.plot is not None:
        plot.write(compared, options.plot)
    parts = [_figures(model), aligned(_comparisons(compared)), _errors(compared)]
    if len(compared) < len(rows):
        parts.append(f"The model does not predict {len(rows) - len(compared)} rows.")
    return "\n\n".join(parts)


def _figures(model: Fit) -> str:
    alphas = ", ".join(f"{alpha:.3f} (k={k})" for k, alpha in sorted(model.alphas.items()))
    passes = (
        f"V, width {width}: {_points(curve)}" for width, curve in sorted(model.verify_at.items())
    )
    step = f"{1e3 * model.step_base:.2f} ms + {1e3 * model.step_request:.2f} ms per request"
    overhead = f"overhead of a round: {_points(model.overhead)}"
    return "\n".join([f"alpha: {alphas}", *passes, f"draft step: {step}", overhead])


def _points(curve: Curve) -> str:
    points = zip(curve.places, curve.values, strict=True)
    return ", ".join(f"{1e3 * seconds:.1f} ms (b={requests})" for requests, seconds in points)


def _comparisons(compared: Sequence[Comparison]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("pipeline", "k", "in flight", "accept", "model", "tokens/s", "model", "error", "")
    ]
    for each in compared:
        row = each.row
        rows.append(
            (
                row.pipeline,
                str(row.k),
                str(row.in_flight),
                "" if row.accept_len is None else f"{row.accept_len:.2f}",
                f"{each.estimate.tokens:.2f}",
                f"{row.tokens_per_s:.1f}",
                f"{each.estimate.rate:.1f}",
                f"{100 * each.error:+.1f} %",
                "fitted" if each.fitted else "",
            )
        )
    return rows


def _errors(compared: Sequence[Comparison]) -> str:
    """The errors of all predicted rows, then of each pipeline, one line each."""
    predicted = [each for each in compared if not each.fitted]
    if not predicted:
        return "No row is predicted: the model is fitted to all rows."
    lines = [f"Error of {len(predicted)} predicted rows: {_spread(predicted)}."]
    for pipeline in dict.fromkeys(each.row.pipeline for each in predicted):
        own = [each for each in predicted if each.row.pipeline == pipeline]
        near = sum(abs(each.error) <= plot.BAND for each in own)
        within = f"{near} of {len(own)} within {100 * plot.BAND:.0f} %"
        lines.append(f"{pipeline}: {_spread(own)}; {within}.")
    return "\n".join(lines)


def _spread(predicted: Sequence[Comparison]) -> str:
    errors = [100 * abs(each.error) for each in predicted]
    return f"median {statistics.median(errors):.1f} %, worst {max(errors):.1f} %"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low - 1.0
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} must be a number from {low:g} to {high:g}"
            )
        return value

    return parse


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be an integer from 1 up to 999999999")
    return int(text)


def _milliseconds(text: str) -> Curve:
    """Parse `40` or `1:30,8:45` as a curve over the number of requests."""
    try:
        if ":" not in text:
            points = {1: float(text)}
        else:
            pairs = (part.split(":") for part in text.split(","))
            points = {_count(requests): float(value) for requests, value in pairs}
    except (ValueError, argparse.ArgumentTypeError):
        points = {1: 0.0}
    if not all(0.0 < value < math.inf for value in points.values()):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} must be milliseconds above 0, or requests:milliseconds pairs such as "
            "1:30,8:45"
        )
    return Curve.through(points.items())
