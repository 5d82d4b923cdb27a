"""The result of one check, and the place that decides what an exception in a check means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
class Finding:
    """What a check found."""

    status: Status
    found: str
    advice: str = ""
    """What to do; empty if there is nothing to do, or if `found` says it."""
    name: str = ""
    """Name of the check, which `examine` adds."""


def ok(found: str) -> Finding:
    return Finding(Status.OK, found)


def warning(found: str, advice: str = "") -> Finding:
    return Finding(Status.WARNING, found, advice)


def failure(found: str, advice: str = "") -> Finding:
    return Finding(Status.FAILURE, found, advice)


def examine(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check. An exception is a failure with the first line of its message.

    The message of a QSpecError says what to do. Other exceptions come from SGLang, from libraries
    and from the system, so their type is part of the finding.
    """
    try:
        found = check()
    except QSpecError as error:
        found = failure(str(error))
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        kind = type(error).__name__
        found = failure(f"{kind}: {first}" if first else kind)
    return replace(found, name=name)
