"""Copies files to an object store, by the file systems of Arrow: Amazon S3 and servers like it.

Arrow finds keys, region and endpoint as other clients do, for example in AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from pathlib import Path

from sglang_qspec.errors import BatchError, ConfigError

COPY_BYTES = 8 << 20


class Bucket:
    """A folder of an object store. A process that is killed while it copies leaves no object."""

    def __init__(self, option: str, uri: str) -> None:
        """`option` has the URI of the folder, such as s3://bucket/answers.

        Raises ConfigError if the folder cannot be used.
        """
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(f"{option} needs Arrow: pip install 'sglang-qspec[s3]'")
        import pyarrow as pa
        from pyarrow import fs

        self._uri = uri.rstrip("/")
        try:
            self._files, self._folder = fs.FileSystem.from_uri(self._uri)
            bucket = self._folder.partition("/")[0]
            found = self._files.get_file_info(bucket).type
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{option} is {uri!r}, but cannot be used: {error}") from None
        if not bucket or found is not fs.FileType.Directory:
            raise ConfigError(f"{option} is {uri!r}, but there is no bucket {bucket!r}")

    def put(self, path: Path, name: str) -> str:
        """Copy a file; returns the URI of the object. Raises BatchError."""
        uri = f"{self._uri}/{name}"
        try:
            with (
                path.open("rb") as source,
                self._files.open_output_stream(f"{self._folder}/{name}") as target,
            ):
                shutil.copyfileobj(source, target, COPY_BYTES)
        except OSError as error:
            raise BatchError(f"{uri} cannot be written: {error}") from None
        return uri

    def remove(self, name: str) -> None:
        """Remove an object, if it is there. Raises BatchError."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._files.delete_file(f"{self._folder}/{name}")
        except OSError as error:
            raise BatchError(f"{self._uri}/{name} cannot be removed: {error}") from None
