"""Fixtures of the engine's tests: a speculator without a server, and a small target for servers."""

from pathlib import Path

import pytest

from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.link import FakeSidecarLink
from sglang_qspec.tools.models import DemoModels
from test.engine.simulation import Clock
from test.engine.speculating import VOCAB, connect, counting
from test.random_llama import write_random_llama


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


@pytest.fixture(scope="session")
def small_target(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights; two ranks can divide its heads. No test changes it."""
    return write_random_llama(
        tmp_path_factory.mktemp("small-target"),
        models,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
