"""Parsers of the values that settings may have.

A parser takes the text of a setting and returns its value. It raises ValueError with the allowed
values as its message.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_qspec.errors import shown

Parser = Callable[[str], Any]
"""Parses the text of a setting; raises ValueError with the allowed values as its message."""

MAX_ENDPOINTS = 16
"""Maximum number of sidecars of one server."""
_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
CORES = "a list of CPU numbers such as 0,2-5"
"""What `parse_cores` allows."""
_CORES = re.compile(r"([0-9]+)(?:-([0-9]+))?")
"""One CPU, or a range of CPUs. `str.isdigit` would accept digits that `int` does not."""


def whole(low: int, high: int) -> Parser:
    """Whole numbers from `low` to `high`."""
    return _parser(int, lambda value: low <= value <= high, f"a whole number from {low} to {high}")


def number(low: float, high: float) -> Parser:
    """Numbers from `low` to `high`."""
    return _parser(float, lambda value: low <= value <= high, f"a number from {low:g} to {high:g}")


def _parser(kind: type, allows: Callable[[Any], bool], allowed: str) -> Parser:
    """Parse values of a `kind`, and refuse those that `allows` does not accept."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not allows(value):
            raise ValueError(allowed)
        return value

    return parse


def positive(text: str) -> int:
    """A whole number from 1 to MAX_POSITIVE, for values that need no other upper limit."""
    value: int = _at_least_1(text)
    if value > MAX_POSITIVE:
        raise ValueError(f"a whole number of at most {MAX_POSITIVE}")
    return value


_at_least_1 = _parser(int, lambda value: value >= 1, "a whole number of at least 1")
MAX_POSITIVE = 2**31 - 1


fraction = _parser(
    float, lambda value: value == 0 or 0.01 <= value <= 0.95, "0 or a number from 0.01 to 0.95"
)
"""Parses a fraction of a device; 0 stands for the default."""


def switch(text: str) -> bool:
    """A switch (1, true, yes, on, or their opposites); an empty text is false."""
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off" | "":
            return False
    raise ValueError("true or false")


def one_of(*choices: str) -> Parser:
    """One of the `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text

    return parse


def widths(most: int) -> Parser:
    """`auto`, or a comma-separated list of pass widths from 1 to `most`; returns the text."""

    def parse(text: str) -> str:
        for width in () if text == "auto" else text.split(","):
            if not width.strip().isdecimal() or not 1 <= int(width) <= most:
                raise ValueError(f"auto or a list of whole numbers from 1 to {most} such as 2,4")
        return text

    return parse


def endpoints(text: str) -> str:
    """A comma-separated list of at most MAX_ENDPOINTS addresses of sidecars; returns the text."""
    allowed = "ipc://PATH or tcp://HOST:PORT, or a comma-separated list of them"
    given = parse_endpoints(text)
    for each in given:
        if not each.startswith(("ipc://", "tcp://")):
            raise ValueError(allowed if each == text else f"{allowed}; {each!r} is neither")
        if given.count(each) > 1:
            raise ValueError(f"a list of different addresses; {each!r} is in it more than once")
    if len(given) > MAX_ENDPOINTS:
        raise ValueError(f"a list of at most {MAX_ENDPOINTS} addresses; it has {len(given)}")
    return text


def parse_endpoints(text: str) -> tuple[str, ...]:
    """The addresses in a comma-separated list; an empty text has none."""
    return tuple(each.strip() for each in text.split(",")) if text else ()


def device(text: str) -> str:
    """The name of a device, or an empty text."""
    if text and not _DEVICE.fullmatch(text):
        raise ValueError("cpu, cuda or cuda:N")
    return text


def cores(*words: str) -> Parser:
    """A list of at least one CPU number (`parse_cores`), or one of `words`; returns the text."""

    def parse(text: str) -> str:
        with contextlib.suppress(ValueError):
            if text in words or parse_cores(text):
                return text
        raise ValueError(f"{', '.join(words)} or {CORES}")

    return parse


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of CPU numbers such as `0,2-5`; an empty text gives an empty set.

    Raises ValueError with the allowed format as its message.
    """
    cores: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        found = _CORES.fullmatch(part)
        named = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        if not named:
            raise ValueError(CORES)
        cores.update(named)
    return frozenset(cores)


def is_local(path: str) -> bool:
    """Whether the path of a model is a folder; otherwise it is a name on a hub."""
    return path.startswith((os.sep, ".", "~")) or path.count("/") != 1


def model(path: str) -> str:
    """The folder of a checkpoint, or a model's name on a hub."""
    if not path or (is_local(path) and not Path(path).expanduser().is_dir()):
        raise ValueError("an existing folder, or a name on a hub such as ORGANIZATION/MODEL")
    return path


def text(given: str) -> str:
    """Any text."""
    return given


def option(parse: Parser) -> Parser:
    """The parser of a command line option, for argparse.

    It raises ArgumentTypeError with the text and the allowed values in its message.
    """

    def parse_option(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"is {shown(text)}, but must be {error}") from None

    return parse_option
