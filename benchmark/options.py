"""Types of command line options, for argparse: what is wrong is said in one sentence."""

from __future__ import annotations

import argparse
import math

from sglang_qspec.config import parse_cores


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
