"""Shows findings in a terminal, and as JSON. docs/doctor.md describes the JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, Status

VERSION = 1
"""Version of the JSON object; increased if a field changes its meaning or goes away."""
STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}
WIDTHS = (9, 15)
"""Columns of the status and of the name."""


def is_usable(findings: Sequence[Finding]) -> bool:
    """Whether no check failed."""
    return all(finding.status is not Status.FAILURE for finding in findings)


def show(finding: Finding, console: Console) -> None:
    """Print a finding, and below it what to do."""
    margin = " " * sum(WIDTHS)
    width = max(console.width, len(margin) + 20)
    parts = [_wrapped(finding.found, width, margin, margin)]
    if finding.advice:
        parts.append(_wrapped(finding.advice, width, margin + "→ ", margin + "  "))
    line = Text(finding.status.value.ljust(WIDTHS[0]), STYLES[finding.status])
    line.append(finding.name.ljust(WIDTHS[1]), "bold")
    line.append("\n".join(parts)[len(margin) :], "none")
    console.print(line, soft_wrap=True)


def _wrapped(text: str, width: int, first: str, others: str) -> str:
    """Break a text into lines between words; paths and flags stay whole."""
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def show_end(findings: Sequence[Finding], case: Case, console: Console) -> None:
    """Print the summary, and the command that starts the server."""
    console.print()
    console.print(Text(summary(findings), style="bold"))
    if case.expectation is not None:
        console.print("\n" + _wrapped(case.expectation, console.width, "", ""), soft_wrap=True)
    command = case.command()
    if command is None:
        console.print("With --model and --draft-model the doctor also checks the models.")
    elif is_usable(findings):
        console.print(Text(f"\nStart the server with:\n\n    {command}"), soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """One sentence on all findings."""
    statuses = [finding.status for finding in findings]
    failures, warnings = statuses.count(Status.FAILURE), statuses.count(Status.WARNING)
    counts = " and ".join(
        f"{count} {noun}{'' if count == 1 else 's'}"
        for count, noun in ((failures, "failure"), (warnings, "warning"))
        if count
    )
    if failures:
        return f"Not usable: {counts}."
    return f"Usable, with {counts}." if counts else "Usable."


def as_json(findings: Sequence[Finding], case: Case) -> dict[str, Any]:
    """The object of `--json`."""
    usable = is_usable(findings)
    return {
        "version": VERSION,
        "usable": usable,
        "warnings": sum(each.status is Status.WARNING for each in findings),
        "checks": [
            {
                "name": finding.name,
                "status": finding.status.value,
                "found": finding.found,
                "advice": finding.advice,
            }
            for finding in findings
        ],
        "command": case.command() if usable else None,
        "expectation": case.expectation,
        "measured": case.measured,
    }
