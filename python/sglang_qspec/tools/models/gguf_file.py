"""A GGUF file: its metadata, and its tensors one at a time.

`read` checks the whole file before it returns. Sizes in a damaged file may be any numbers, so
nothing is allocated that the file does not contain.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sglang_qspec.errors import QSpecError, shown

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = "BbHhIif?  Qqd"
"""Formats of `struct` for the types 0 to 12 of metadata values; 8 and 9 are no numbers."""
_BOOL = 7
_MOST_VALUES = 1 << 22
"""Maximum number of values in an array; the largest vocabularies have some 260,000 tokens."""
_CHUNK_BYTES = 1 << 24
"""Bytes of float32 weights that `Tensor.chunks` decodes at once."""


class _DamageError(Exception):
    """What is wrong with a file."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. Its values stay in the file until they are read."""

    name: str
    shape: tuple[int, ...]
    """As in torch: the last dimension is contiguous."""
    kind: int
    """Number of the tensor's type, a `GGMLQuantizationType`."""
    file: Path
    start: int
    """Offset of the data from the begin of the file, in bytes."""
    row_bytes: int
    """Bytes of the data for each index of all dimensions but the last."""

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def end(self) -> int:
        return self.start + self.rows * self.row_bytes

    def chunks(self) -> Iterator[np.ndarray[Any, Any]]:
        """The values in order: float32 arrays [rows, last dimension], of 16 MiB or one row."""
        from gguf import GGMLQuantizationType, dequantize

        step = max(1, _CHUNK_BYTES // (4 * self.shape[-1]))
        with self.file.open("rb") as file:
            file.seek(self.start)
            for first in range(0, self.rows, step):
                rows = min(step, self.rows - first)
                raw = np.fromfile(file, np.uint8, rows * self.row_bytes)
                with np.errstate(all="ignore"):  # the caller checks that the values are finite
                    values = dequantize(
                        raw.reshape(rows, self.row_bytes), GGMLQuantizationType(self.kind)
                    )
                yield values.reshape(rows, self.shape[-1])

    def values(self) -> np.ndarray[Any, Any]:
        """All values, float32 of `shape`."""
        found = np.empty((self.rows, self.shape[-1]), np.float32)
        first = 0
        for chunk in self.chunks():
            found[first : first + len(chunk)] = chunk
            first += len(chunk)
        return found.reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    """By key: numbers, texts, and lists of them."""
    tensors: dict[str, Tensor]


def read(path: Path) -> GGUFFile:
    """Read the metadata and the table of tensors. Raises QSpecError if the file is damaged."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise _DamageError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).read()
    except _DamageError as damage:
        raise QSpecError(f"{path} cannot be read as a GGUF file: {damage}") from None


class _Reader:
    """Reads a file from its begin on."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._place = 0

    def read(self) -> GGUFFile:
        if (magic := self._bytes(4, "magic")) != b"GGUF":
            raise _DamageError(f"it begins with {magic!r}, but must begin with b'GGUF'")
        version = self._number("I", "version")
        if version not in _VERSIONS:
            order = " (big-endian)" if version & 0xFFFF == 0 else ""
            raise _DamageError(
                f"the version is {version}{order}, but must be 2 or 3, little-endian"
            )
        tensors = self._count("number of tensors", at_least=24)
        pairs = self._count("number of metadata keys", at_least=13)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text("a metadata key")
            if key in metadata:
                raise _DamageError(f"the metadata key {shown(key)} occurs twice")
            metadata[key] = self._value(self._number("I", key), key)
        table = [self._entry() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _DamageError(
                f"general.alignment is {shown(alignment)}, but must be a power of two"
            )
        begin = -(-self._place // alignment) * alignment
        found: dict[str, Tensor] = {}
        for name, shape, kind, offset in table:
            if name in found:
                raise _DamageError(f"the tensor {shown(name)} occurs twice")
            found[name] = self._tensor(name, shape, kind, offset, begin, alignment)
        for left, right in pairwise(sorted(found.values(), key=lambda each: each.start)):
            if left.end > right.start:
                raise _DamageError(
                    f"the tensors {shown(left.name)} and {shown(right.name)} overlap"
                )
        return GGUFFile(self._path, metadata, found)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("the name of a tensor")
        dimensions = self._number("I", name)
        if not 1 <= dimensions <= 4:
            raise _DamageError(f"{shown(name)} has {dimensions} dimensions, but must have 1 to 4")
        shape = tuple(self._number("Q", name) for _ in range(dimensions))[::-1]
        return name, shape, self._number("I", name), self._number("Q", name)

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int, alignment: int
    ) -> Tensor:
        block, size = _block(name, kind)
        if not all(shape) or shape[-1] % block:
            raise _DamageError(
                f"{shown(name)} has the shape {list(shape)}, but must have positive dimensions, "
                f"the last one a multiple of {block}"
            )
        if offset % alignment:
            raise _DamageError(
                f"{shown(name)} has the offset {offset}, but it must be a multiple of {alignment}"
            )
        tensor = Tensor(name, shape, kind, self._path, begin + offset, shape[-1] // block * size)
        if tensor.end > len(self._content):
            raise _DamageError(
                f"{shown(name)} of the shape {list(shape)} ends at byte {tensor.end}, but the file "
                f"has {len(self._content)} bytes"
            )
        return tensor

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._number(_format(kind, key), key)

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I", key)
        if kind == _ARRAY:
            raise _DamageError(f"{shown(key)} is an array of arrays, which are not allowed")
        form = "" if kind == _STRING else _format(kind, key)
        width = struct.calcsize(f"<{form}") if form else 8
        count = self._count(f"number of values of {shown(key)}", at_least=width)
        if count > _MOST_VALUES:
            raise _DamageError(
                f"{shown(key)} has {count} values, but at most {_MOST_VALUES} may be"
            )
        if not form:
            return [self._text(key) for _ in range(count)]
        raw = self._bytes(count * width, key)
        if kind == _BOOL and raw.strip(b"\0\1"):
            raise _DamageError(f"{shown(key)} has truth values that are neither 0 nor 1")
        return list(struct.unpack(f"<{count}{form}", raw))

    def _number(self, form: str, what: str) -> Any:
        raw = self._bytes(struct.calcsize(f"<{form}"), what)
        if form == "?" and raw not in (b"\0", b"\1"):
            raise _DamageError(f"{shown(what)} is the truth value {raw[0]}, but must be 0 or 1")
        return struct.unpack(f"<{form}", raw)[0]

    def _text(self, what: str) -> str:
        raw = self._bytes(self._number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise _DamageError(f"the text of {shown(what)} is not UTF-8: {error.reason}") from None

    def _count(self, what: str, at_least: int) -> int:
        """Read the number of things that each take `at_least` that many bytes of the file."""
        count: int = self._number("Q", what)
        left = len(self._content) - self._place
        if count * at_least > left:
            raise _DamageError(f"the {what} is {count}, but only {left} bytes follow")
        return count

    def _bytes(self, size: int, what: str) -> bytes:
        left = len(self._content) - self._place
        if size > left:
            raise _DamageError(f"{shown(what)} takes {size} bytes, but only {left} follow")
        self._place += size
        return self._content[self._place - size : self._place]


def _format(kind: int, key: str) -> str:
    form = _NUMBERS[kind] if kind < len(_NUMBERS) else " "
    if form == " ":
        raise _DamageError(f"{shown(key)} has a value of the type {kind}, but must have 0 to 12")
    return form


def _block(name: str, kind: int) -> tuple[int, int]:
    """Values in a block of a type of tensors, and bytes of the block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import _type_traits

    kinds = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, *_type_traits}
    if kind not in kinds:
        names = ", ".join(sorted(each.name for each in kinds))
        raise _DamageError(f"{shown(name)} has the type {kind}, but must have one of {names}")
    return GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
