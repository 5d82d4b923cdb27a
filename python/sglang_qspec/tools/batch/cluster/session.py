"""Connects the batch to a Ray cluster, and finds out what the cluster has."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import ray

from sglang_qspec.errors import ClientError, first_line

LOCAL = "local"
"""The address that starts a cluster on this machine, which ends with the batch."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Use the cluster at `address`, or a new one if that is `local`.

    Raises ClientError if no cluster answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    dashboard = False if address == LOCAL else None
    try:
        ray.init(
            address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClientError(
            f"--ray is {address!r}, but must be 'local', 'auto', or the HOST:PORT of a Ray "
            f"cluster: {first_line(error)}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def total(resource: str) -> float:
    """How much of a resource, such as `CPU`, all nodes have together."""
    return sum(node.get(resource, 0.0) for node in nodes())


def free(resource: str) -> float:
    """How much of a resource no actor and no task has."""
    found: dict[str, float] = ray.available_resources()
    return found.get(resource, 0.0)


def nodes() -> list[dict[str, float]]:
    """The resources of each node that is alive."""
    found = ray.nodes()
    return [node["Resources"] for node in found if node["Alive"]]
