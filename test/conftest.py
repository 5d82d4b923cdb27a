"""Shared by all tests: SGLang on a CPU, the demo models, and the `--thorough` option."""

import os
import shutil

import pytest

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang_qspec.models import DemoModels, demo_models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run the tests that take minutes too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    long = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def models() -> DemoModels:
    """SmolLM2-135M-Instruct and its 8-bit draft, converted once."""
    return demo_models()
