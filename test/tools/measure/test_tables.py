"""Tables: interpolation, the file and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.measure import tables
from test.tools.plan.examples import flat


def record(**changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(flat()), **changes}


def test_tables_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    tables.save(flat(["1101", "10"]), path)
    assert tables.load(path) == flat(["1101", "10"])


def test_times_are_interpolated_over_requests_and_width() -> None:
    verify = [tables.Verify(b, w, 0.01 * b * w) for b in (1, 3) for w in (1, 5)]
    found = msgspec.structs.replace(flat(), verify=verify)
    assert found.passes(2, 3) == pytest.approx(0.06)
    assert found.passes(2, 1.5) == pytest.approx(0.03)
    assert (found.passes.widest, found.passes.most_requests) == (5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "$.version"),
        ({"source": "guessed"}, "$.source"),
        ({"verify": []}, "length >= 1 - at `$.verify`"),
        ({"verify": [{"requests": 1, "width": 1, "seconds": 0}]}, "$.verify[0].seconds"),
        (
            {"verify": [{"requests": b, "width": b, "seconds": 1} for b in (1, 8)]},
            "no row with 1 requests and width 8",
        ),
        ({"agreement": {"step": 1.5}}, "$.agreement"),
        ({"agreement": {"step": ["12"]}}, "$.agreement"),
        ({"agreement": {}}, "$.agreement"),
        ({"slowdown": 0.5}, "$.slowdown"),
        ({"speed": 1}, "unknown field `speed`"),
    ],
)
def test_a_file_that_is_not_allowed_names_the_field(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(record(**changes)))
    with pytest.raises(ConfigError) as raised:
        tables.load(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.json, which cannot be read"):
        tables.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        tables.save(flat(), tmp_path / "none" / "tables.json")


def test_times_between_measured_numbers_of_requests_are_interpolated() -> None:
    passes = tables.PassSeconds({(1, 2): 0.1, (3, 2): 0.3})
    assert passes(2, 2) == pytest.approx(0.2)
    assert (passes.widths(1), passes.widths(2), passes.widest) == ([2], [], 2)
