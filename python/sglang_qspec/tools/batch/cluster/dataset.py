"""Reads the lines of an input by Ray Data: from object stores, folders and Parquet."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import ray.data
from ray.data.datasource import FileBasedDatasource
from ray.exceptions import RayError

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.batch.source import MAX_LINE_BYTES, PARQUET, Numbered

READ_BYTES = 8 << 20
"""Number of bytes that a task reads of a file at once."""
ROWS = 256
"""Number of rows that come from Ray at once."""
CPUS = 0.0
"""CPUs of a task that reads. Servers may hold all CPUs of the cluster, and it would wait for them.
"""


class RaySource:
    """Files that all nodes of the cluster can read.

    If the name ends in `.parquet`, each row of the files or of the folder is a line, and its
    columns are the keys of the line. Otherwise the files are JSONL. Lines are numbered across all
    files, in the order of the names.
    """

    can_be_read_once = False

    def __init__(self, path: str) -> None:
        """`path` is a URI that Ray Data knows, or a path."""
        self.name = path
        self._is_parquet = path.rstrip("/").endswith(PARQUET)

    def parts(self) -> Iterator[list[Numbered]]:
        """All lines, some at a time. Raises BatchError if the input cannot be read."""
        number = 0
        try:
            for table in self._tables():
                part: list[Numbered] = []
                for text in self._texts(table):
                    number += 1
                    if text.strip():
                        part.append((number, text if len(text) <= MAX_LINE_BYTES else None))
                yield part
        except (RayError, OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise BatchError(f"the input {self.name} cannot be read: {reason}") from None

    def _tables(self) -> Iterator[pa.Table]:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True  # the numbers depend on it
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        read: Any
        if self._is_parquet:
            read = ray.data.read_parquet(self.name, num_cpus=CPUS)
        else:
            read = ray.data.read_datasource(_Lines(self.name), num_cpus=CPUS)
        tables: Iterator[pa.Table] = iter(
            read.iter_batches(batch_size=ROWS, batch_format="pyarrow")
        )
        return tables

    def _texts(self, table: pa.Table) -> Iterator[bytes]:
        """The JSON of each row."""
        if self._is_parquet:
            for row in table.to_pylist():
                yield msgspec.json.encode(_without_none(row))
        else:
            yield from table.column("text").to_pylist()


class _Lines(FileBasedDatasource):
    """The lines of files, as bytes.

    Ray's own `read_text` also ends a line at U+2028 and the like, which JSON allows in a text, and
    refuses a file with one byte that is not UTF-8.
    """

    def _read_stream(self, f: pa.NativeFile, path: str) -> Iterator[pa.Table]:  # noqa: ARG002
        rest = b""
        while piece := f.read(READ_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            yield _table(lines)
        if rest:
            yield _table([rest])


def _table(lines: list[bytes]) -> pa.Table:
    return pa.table({"text": pa.array(lines, pa.large_binary())})


def _without_none(value: Any) -> Any:
    """A value without the keys that are None, which Parquet gives to all rows alike."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return value
