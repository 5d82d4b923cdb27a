"""The result of one check, and the place that decides what an exception in a check means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sglang_qspec.errors import QSpecError


class Status(StrEnum):
    """What a finding means for a server."""

    OK = "ok"
    WARNING = "warning"
    """A server starts, but slower than it could be, or only if the advice is followed."""
    FAILURE = "failure"
    """A server does not start, or runs without drafts of the sidecar."""


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    status: Status
    found: str
    advice: str = ""
    """What to do; empty if there is nothing to do, or if `found` says it."""


@dataclass(frozen=True)
class Finding:
    """A verdict with the name of its check."""

    name: str
    verdict: Verdict


def ok(found: str) -> Verdict:
    return Verdict(Status.OK, found)


def warning(found: str, advice: str = "") -> Verdict:
    return Verdict(Status.WARNING, found, advice)


def failure(found: str, advice: str = "") -> Verdict:
    return Verdict(Status.FAILURE, found, advice)


def examine(name: str, check: Callable[[], Verdict]) -> Finding:
    """Run a check. An exception is a failure with the first line of its message.

    The message of a QSpecError says what to do. Other exceptions come from SGLang, from libraries
    and from the system, so their type is part of the finding.
    """
    try:
        return Finding(name, check())
    except QSpecError as error:
        return Finding(name, failure(str(error)))
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        kind = type(error).__name__
        return Finding(name, failure(f"{kind}: {first}" if first else kind))
