"""SGLang's own class of EAGLE-3 heads loads our checkpoints, and gives the same logits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_qspec.heads import checkpoint
from test import forked
from test.heads.tiny import VOCAB, random_head

TOKENS = 12

pytestmark = pytest.mark.server
"""A process loads a model with SGLang, which takes seconds."""


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings of the target, and the tokens and states of a text."""
    torch.manual_seed(2)
    ids = torch.randint(VOCAB, (TOKENS,))
    return torch.randn(VOCAB, 64), ids, torch.randn(TOKENS, 3 * 64)


def logits_of_sglang(folder: Path) -> tuple[str, list[int], torch.Tensor]:
    """The class that loads the head, its ids, and its logits after the text."""
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    class WithStates(DraftModel):
        """Reads the states that SGLang's worker would pass."""

        def _forward(self, **fields: Any) -> torch.Tensor:
            return super()._forward(spec_info=SimpleNamespace(hidden_states=states), **fields)

    _, ids, states = inputs()
    limits: Any = {"max_total_tokens": 64, "context_len": 32, "rows": 2, "batch": 1}
    options = DraftModelOptions(str(folder), dtype="float32", device="cpu", **limits)
    model = WithStates(options, drafts_only=False)
    loaded = model._runner.model
    found = model.extend([model.rows.open()], [ids.tolist()])[0, : loaded.config.draft_vocab_size]
    return type(loaded).__name__, loaded.hot_token_id.tolist(), found.clone()


def test_sglang_computes_the_same_logits(tmp_path: Path) -> None:
    head = random_head()
    checkpoint.save(head, tmp_path, torch.float32)
    embedding, ids, states = inputs()
    path = tmp_path / checkpoint.WEIGHTS
    tensors = {**load_file(path), "embed_tokens.weight": embedding}  # SGLang takes the target's
    save_file(tensors, path, metadata={"format": "pt"})

    hidden = head.project(states[None])
    positions = torch.arange(TOKENS)[None]
    query, key, value = head.inputs(embedding[ids][None], hidden, positions)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    own = head.logits(head.output(mixed, hidden))[0, -1]

    name, target_ids, found = forked.run(logits_of_sglang, tmp_path)
    assert name == "LlamaForCausalLMEagle3"
    assert target_ids == head.target_ids.tolist()
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
