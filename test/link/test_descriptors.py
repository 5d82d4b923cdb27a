"""The limit of open files, and the share of it for connections."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from sglang_qspec.link import descriptors


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _limit(soft: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_the_hard_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _limit(256)
    descriptors.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_connections_may_take_half_of_the_free_descriptors() -> None:
    used = len(os.listdir("/proc/self/fd"))
    _limit(used + 100)
    assert 48 <= descriptors.spare() <= 50


def test_at_least_one_connection_is_allowed() -> None:
    # Listing the open descriptors opens one more.
    _limit(len(os.listdir("/proc/self/fd")) + 1)
    assert descriptors.spare() == 1
