"""Writes the results as a Markdown page; docs/results.md takes its tables from such pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark.gpu_check.check import failures, skips
from benchmark.gpu_check.findings import Findings
from benchmark.harness.report import Table
from benchmark.harness.statistics import number


def page(found: Mapping[str, Findings], record: Mapping[str, Any]) -> str:
    """Conditions, a table of the parts, failures, and the tables of all parts."""
    what = "Emulated on a CPU: no figure here is of a GPU." if record["emulated"] else ""
    facts = [f"    {record['command']}", "", f"{record['machine']}; {record['versions']}. {what}"]
    columns = {
        "part": lambda row: row[0],
        "result": lambda row: result(row[1]),
        "checks": lambda row: len(row[1].passed),
        "seconds": lambda row: row[1].seconds,
        "peak memory, MiB": lambda row: row[1].peak_mib,
    }
    parts = Table.of("Parts", found.items(), columns)
    reasons = [f"- failed: {name}: {why}" for name, why in failures(found).items()]
    reasons += [f"- skipped: {name}: {why}" for name, why in skips(found).items()]
    tables = [table.markdown() for each in found.values() for table in each.tables]
    summed = ("eager_passes", "identical")
    sums = ", ".join(f"{name}: {number(record[name])}" for name in summed)
    texts = ["# GPU check", *facts, "", f"{sums}.", "", parts.markdown(), *reasons, "", *tables]
    return "\n".join(texts)


def result(findings: Findings) -> str:
    """passed, failed or skipped."""
    if findings.failed:
        return "failed"
    return "skipped" if "" in findings.skipped else "passed"
