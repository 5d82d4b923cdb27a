"""The command `qspec theory`: a table of the pipelines, or the model fitted to a measured run."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sglang_qspec import values
from sglang_qspec.errors import TheoryError
from sglang_qspec.policy.curve import Curve
from sglang_qspec.policy.pipelines import estimates
from sglang_qspec.tools import declare
from sglang_qspec.tools.table import aligned
from sglang_qspec.tools.theory import plot
from sglang_qspec.tools.theory.fit import FittedModel, PredictedResult, fit, predict
from sglang_qspec.tools.theory.results import read_results

NEEDED = ("alpha", "k", "verify_ms", "draft_ms", "in_flight")
"""Options that the table of the pipelines requires."""
FIGURES = (*NEEDED, "plain_ms", "lookahead", "again")
"""Options that only the table of the pipelines takes."""
AGAIN = 0.5
"""Default of --again."""
DESCRIPTION = """Print the expected tokens per pass, time per round and speedup of each pipeline,
from the agreement of target and drafter and the times of both. With --fit, fit the model to a run
of benchmark.bench_peers --pipelines and compare it with the measurements. docs/theory.md has the
model. A time is a number of milliseconds, or a list of requests:milliseconds such as 1:30,8:45,
with linear interpolation between."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(declare.value, parser)
    share = values.number(0.0, 1.0)
    add("--alpha", "probability that target and drafter agree on a token, 0 to 1", share, "A")
    drafts = "number of draft tokens that a pass verifies for each request"
    add("--k", drafts, values.positive, "N")
    add("--verify-ms", "time of a pass of width k + 1", _milliseconds, "MS")
    plain = "time of a plain decode pass, width 1 (default: the time of --verify-ms)"
    add("--plain-ms", plain, _milliseconds, "MS")
    add("--draft-ms", "time of drafting k tokens", _milliseconds, "MS")
    add("--in-flight", "number of requests that are served at once", values.positive, "N")
    lookahead = "maximum length of a draft of ahead after the committed tokens (default: 2k + 1)"
    add("--lookahead", lookahead, values.positive, "N")
    add(
        "--again",
        "probability that a text without a matching queue draft matches one at the next pass, for "
        f"queue (default: {AGAIN})",
        share,
        "P",
    )
    add("--fit", "results.json of a run to fit the model to", Path, "RESULTS")
    add("--plot", "file for a plot of the prediction (with --fit)", Path, "PNG")
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
    results = read_results(options.fit)
    model = fit(results)
    predicted = predict(model, results)
    if options.plot is not None:
        plot.write(predicted, options.plot)
    parts = [_figures(model), aligned(_table(predicted)), _errors(predicted)]
    if len(predicted) < len(results):
        parts.append(f"The model does not predict {len(results) - len(predicted)} rows.")
    return "\n\n".join(parts)


def _figures(model: FittedModel) -> str:
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


def _table(predicted: Sequence[PredictedResult]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        ("pipeline", "k", "in flight", "accept", "model", "tokens/s", "model", "error", "")
    ]
    for each in predicted:
        result = each.result
        lines.append(
            (
                result.pipeline,
                str(result.draft_tokens),
                str(result.in_flight),
                f"{result.accept_len:.2f}" if result.accept_len else "",
                f"{each.estimate.tokens:.2f}",
                f"{result.tokens_per_s:.1f}",
                f"{each.estimate.rate:.1f}",
                f"{100 * each.error:+.1f} %",
                "fitted" if each.fitted else "",
            )
        )
    return lines


def _errors(predicted: Sequence[PredictedResult]) -> str:
    """The errors of all predicted rows, then of each pipeline, one line each."""
    unseen = [each for each in predicted if not each.fitted]
    if not unseen:
        return "No row is predicted: the model is fitted to all rows."
    lines = [f"Error of {len(unseen)} predicted rows: {_spread(unseen)}."]
    for pipeline in dict.fromkeys(each.result.pipeline for each in unseen):
        own = [each for each in unseen if each.result.pipeline == pipeline]
        near = sum(abs(each.error) <= plot.BAND for each in own)
        within = f"{near} of {len(own)} within {100 * plot.BAND:.0f} %"
        lines.append(f"{pipeline}: {_spread(own)}; {within}.")
    return "\n".join(lines)


def _spread(predicted: Sequence[PredictedResult]) -> str:
    errors = [100 * abs(each.error) for each in predicted]
    return f"median {statistics.median(errors):.1f} %, worst {max(errors):.1f} %"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _milliseconds(text: str) -> Curve:
    """Parse `40` or `1:30,8:45` as a curve over the number of requests. Raises ValueError."""
    points: dict[float, float] = {}
    try:
        for part in text.split(","):
            requests, _, milliseconds = part.rpartition(":")
            points[values.positive(requests) if ":" in text else 1] = float(milliseconds)
    except ValueError:
        points = {1: 0.0}
    if not all(0.0 < value < math.inf for value in points.values()):
        raise ValueError("milliseconds above 0, or requests:milliseconds pairs such as 1:30,8:45")
    return Curve.through(points.items())
