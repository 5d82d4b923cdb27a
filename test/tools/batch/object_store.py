"""An S3 server of moto in this process, and its objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "answers"


class ObjectStore:
    """A bucket."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def objects(self) -> dict[str, bytes]:
        """Contents by name."""
        listed = self._client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        get = self._client.get_object
        names = [each["Key"] for each in listed]
        return {name: get(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A store that this process and its children find by the environment."""
    boto3 = pytest.importorskip("boto3")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        try:
            yield ObjectStore(client)
        finally:
            server.stop()
