"""What all tests share: SGLang importable on a machine without a GPU, and the demo models."""

import os
import shutil

import pytest

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang_qspec.models import DemoModels, demo_models


@pytest.fixture(scope="session")
def models() -> DemoModels:
    """SmolLM2-135M-Instruct and its 8-bit draft, converted once."""
    return demo_models()
