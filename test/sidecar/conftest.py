"""The draft model of these tests: the demo target in float32, loaded once."""

from collections.abc import Iterator

import pytest

from sglang_qspec.sidecar.draft_model import DraftModel
from sglang_qspec.sidecar.loading import DraftModelOptions
from sglang_qspec.tools.models import DemoModels


@pytest.fixture(scope="session")
def loaded(models: DemoModels) -> DraftModel:
    return DraftModel(
        DraftModelOptions(
            str(models.target),
            dtype="float32",
            device="cpu",
            max_total_tokens=4096,
            context_len=512,
            rows=64,
        )
    )


@pytest.fixture
def model(loaded: DraftModel) -> Iterator[DraftModel]:
    """The draft model; each test must free all KV that it takes."""
    yield loaded
    loaded.rows.check_integrity()
    assert loaded.rows.free_slots == loaded.rows.total_slots
    assert loaded.rows.free_rows == 64
