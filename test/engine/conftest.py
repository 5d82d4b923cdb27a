"""Fixtures of the tests that drive a speculator without a server."""

import pytest

from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from test.engine.simulation import Clock
from test.engine.speculating import VOCAB, connect, counting


@pytest.fixture
def link() -> FakeSidecarLink:
    """A link to a sidecar with completions that count up from the last token."""
    return FakeSidecarLink(counting, vocab_size=VOCAB)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def active(link: FakeSidecarLink) -> Speculator:
    """A speculator with a sidecar that is ready."""
    return connect(link)
