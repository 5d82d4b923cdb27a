"""Rows of results.json, the measurements that `benchmark.bench_batch_parallel` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_qspec.errors import TheoryError

PLAIN = ("none", "plain")
"""Names of the pipeline without drafts."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement of one pipeline with one k and one number of requests in flight."""

    pipeline: str
    k: int
    in_flight: int
    tokens_per_s: float
    """Throughput of all requests together."""
    accept_len: float | None = None
    """Accept length: tokens of one request per pass; None if not measured."""
    verify_s: float | None = None
    """V: seconds of a pass without waits; None if not measured."""
    draft_s: float | None = None
    """D: seconds of drafting for one pass; None if not measured."""
    step_tokens: int | None = None
    """Maximum length of a draft after the committed tokens; None means 2k + 1."""


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a results.json. Raises TheoryError if it is not one."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TheoryError(f"{path} cannot be read as JSON: {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise TheoryError(f"{path} has no list of rows under the key 'rows'")
    return [_row(row, f"row {number} of {path}") for number, row in enumerate(rows, 1)]


def _row(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise TheoryError(f"{where} is {row!r}, but must be an object")
    pipeline = row.get("pipeline")
    if not isinstance(pipeline, str):
        raise TheoryError(f"pipeline in {where} is {pipeline!r}, but must be a name")
    return Row(
        pipeline=pipeline,
        k=0 if pipeline in PLAIN or _drafts_nothing(row) else _whole(row, "k", where),
        in_flight=_whole(row, "in_flight", where),
        tokens_per_s=_positive(row, "tokens_per_s", where),
        accept_len=_optional(row, "accept_len", where),
        verify_s=_optional(row, "verify_s", where),
        draft_s=_optional(row, "draft_s", where),
        step_tokens=_whole(row, "step_tokens", where) if row.get("step_tokens") else None,
    )


def _drafts_nothing(row: Mapping[str, object]) -> bool:
    """Whether k is null in the row, as for plain decoding on more processors."""
    return "k" in row and row["k"] is None


def _whole(row: Mapping[str, object], key: str, where: str) -> int:
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TheoryError(f"{key} in {where} is {value!r}, but must be an integer from 1 up")
    return value


def _positive(row: Mapping[str, object], key: str, where: str) -> float:
    value = row.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise TheoryError(f"{key} in {where} is {value!r}, but must be a number above 0")


def _optional(row: Mapping[str, object], key: str, where: str) -> float | None:
    """A positive number, or None if the key is absent, null or 0."""
    return _positive(row, key, where) if row.get(key) else None
