"""A real sidecar loads the given revision of the draft model, and the tokenizer of that revision.

The hub is a cache folder with two revisions of one model, in the layout of the hub's client.
"""

import json
from pathlib import Path

import pytest

from sglang_qspec.config import QSpecConfig
from sglang_qspec.tools.models import DemoModels
from test.random_llama import write_random_llama
from test.sidecar.running import Connection, hello_of, running

NAME = "demo/draft"
COMMITS = {"main": "a" * 40, "small": "b" * 40}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
CONTEXTS = {"main": 555, "small": 777}
"""The revisions differ in context length, and `main` has a token that the target lacks."""


@pytest.fixture
def hub(models: DemoModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache for the processes that the test starts."""
    root = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    for revision, commit in COMMITS.items():
        (root / "refs" / revision).write_text(commit)
        folder = root / "snapshots" / commit
        write_random_llama(folder, models, max_position_embeddings=CONTEXTS[revision], **SHAPE)
    tokenizer = root / "snapshots" / COMMITS["main"] / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary["another"] = vocabulary.pop(last)
    content["model"]["merges"] = []
    tokenizer.write_text(json.dumps(content))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.usefixtures("hub")
def test_a_sidecar_loads_the_weights_and_the_tokenizer_of_its_revision(models: DemoModels) -> None:
    settings = QSpecConfig(mem_fraction=0.05, draft_slots=2)
    with (
        running(settings, NAME, revision="small") as sidecar,
        Connection(*sidecar, hello_of(models.target)) as server,
    ):
        assert server.link.refusal is None
        assert server.link.sidecar is not None
        assert server.link.sidecar.context_len == CONTEXTS["small"]
