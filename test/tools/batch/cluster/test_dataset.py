"""Inputs that Ray Data reads: text files, folders and Parquet."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.batch.cluster.dataset import RaySource
from sglang_qspec.tools.batch.cluster.session import connected
from sglang_qspec.tools.batch.line import CHAT, PLAIN
from sglang_qspec.tools.batch.lines import Lines
from test.tools.batch.fakes import write_lines


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with connected("local"):
        yield


def read(path: Path | str) -> list[tuple[int, str]]:
    """Number and custom_id of all lines, which are equal in both ways to read them."""
    lines = Lines(RaySource(str(path)))
    lines.check()

    async def collect() -> list[tuple[int, str]]:
        return [(line.number, line.custom_id) async for line in lines.unanswered()]

    found = asyncio.run(collect())
    assert lines.total == len(found)
    return found


def test_the_lines_of_a_folder_are_numbered_in_the_order_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(3):
        write_lines(folder / f"part-{part}.jsonl", [f"{part}-{i}" for i in range(300)])
    with gzip.open(folder / "part-3.jsonl.gz", "wt") as file:
        file.write('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    wanted = [(300 * part + i + 1, f"{part}-{i}") for part in range(3) for i in range(300)]
    assert read(folder) == [*wanted, (901, "901"), (903, "903")]


def test_a_uri_is_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", ["a", "b"])
    assert read(f"file://{path}") == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_end_at_newlines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """U+2028 and U+0085 may stand in a JSON text."""
    monkeypatch.setattr("sglang_qspec.tools.batch.cluster.dataset.READ_BYTES", 7)
    texts = ["one\u2028two", "three\u0085four", "five"]
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_text("\r\n".join(lines) + end)
    found = list(chain.from_iterable(RaySource(f"file://{path}").parts()))
    assert [json.loads(text or b"")["prompt"] for _, text in found] == texts
    assert [number for number, _ in found] == [1, 2, 3]


def test_a_line_that_is_not_utf_8_costs_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n{"prompt": "b"}\n')
    lines = Lines(RaySource(f"file://{path}"), skip_invalid=True)
    lines.check()
    assert (lines.total, lines.invalid) == (2, 1)


def test_the_columns_of_parquet_are_the_keys_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    rows = [
        {"custom_id": "a", "prompt": "one", "messages": None, "max_tokens": 4},
        {"custom_id": "b", "prompt": None, "messages": [{"role": "user", "content": "two"}]},
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)

    async def collect() -> list[tuple[str, str, dict[str, object]]]:
        lines = Lines(RaySource(str(path)))
        return [
            (line.custom_id, line.url, json.loads(line.body)) async for line in lines.unanswered()
        ]

    (first, one, one_body), (second, two, two_body) = asyncio.run(collect())
    assert (first, one, second, two) == ("a", PLAIN, "b", CHAT)
    assert one_body == {"prompt": "one", "max_tokens": 4, "return_spec_tokens_details": True}
    assert two_body["messages"] == [{"role": "user", "content": "two"}]
    assert "prompt" not in two_body


def test_an_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"the input .*none/ cannot be read"):
        Lines(RaySource(f"file://{tmp_path}/none/")).check()
    bad = tmp_path / "bad.parquet"
    bad.write_text("no Parquet")
    with pytest.raises(BatchError, match=r"bad.parquet cannot be read"):
        Lines(RaySource(str(bad))).check()
