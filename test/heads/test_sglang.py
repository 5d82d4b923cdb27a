"""SGLang's own classes of EAGLE heads load our checkpoints, and give the same logits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_qspec.heads import checkpoint
from sglang_qspec.heads.model import Eagle2Head, EagleHead
from test import forked
from test.heads.tiny import VOCAB, random_eagle2, random_head

TOKENS = 12

pytestmark = pytest.mark.server
"""A process loads a model with SGLang, which takes seconds."""


def inputs(states: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The target's embeddings and LM head, and the tokens and states of a text."""
    torch.manual_seed(2)
    ids = torch.randint(VOCAB, (TOKENS,))
    embedding, lm_head = torch.randn(2, VOCAB, 64)
    return embedding, lm_head, ids, torch.randn(TOKENS, states * 64)


def logits_of_sglang(folder: Path, states: int) -> tuple[str, list[int], torch.Tensor]:
    """The class that loads the head, its ids, and its logits after the text."""
    from sglang_qspec.sidecar.draft_model import DraftModel
    from sglang_qspec.sidecar.loading import DraftModelOptions

    class WithStates(DraftModel):
        """Reads the states that SGLang's worker would pass."""

        def _forward(self, **fields: Any) -> torch.Tensor:
            return super()._forward(spec_info=SimpleNamespace(hidden_states=given), **fields)

    _, lm_head, ids, given = inputs(states)
    limits: Any = {"max_total_tokens": 64, "context_len": 32, "rows": 2, "batch": 1}
    options = DraftModelOptions(str(folder), dtype="float32", device="cpu", **limits)
    model = WithStates(options, drafts_only=False)
    loaded = model._runner.model
    hot: Any = getattr(loaded, "hot_token_id", None)
    if hot is None:
        loaded.lm_head.weight.data[:VOCAB] = lm_head  # SGLang takes the target's
    drafted = VOCAB if hot is None else loaded.config.draft_vocab_size
    found = model.extend([model.rows.open()], [ids.tolist()])[0, :drafted]
    return type(loaded).__name__, [] if hot is None else hot.tolist(), found.clone()


def written(head: EagleHead, folder: Path, embedding: torch.Tensor) -> None:
    """Write a checkpoint with the target's embeddings, which SGLang would put there."""
    checkpoint.save(head, folder, torch.float32)
    path = folder / checkpoint.WEIGHTS
    tensors = load_file(path)
    if isinstance(head, Eagle2Head):
        tensors = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    save_file({**tensors, "embed_tokens.weight": embedding}, path, metadata={"format": "pt"})


def own_logits(
    head: EagleHead, embedding: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """The logits of a head after a text with these states, as the head reads them."""
    positions = torch.arange(TOKENS)[None]
    query, key, value, residual = head.inputs(embedding[ids][None], hidden[None], positions)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return head.logits(head.output(mixed, residual))[0, -1]


def test_sglang_computes_the_same_logits(tmp_path: Path) -> None:
    head = random_head()
    embedding, _, ids, states = inputs(3)
    written(head, tmp_path, embedding)
    own = own_logits(head, embedding, ids, head.project(states))
    name, target_ids, found = forked.run(logits_of_sglang, tmp_path, 3)
    assert name == "LlamaForCausalLMEagle3"
    assert target_ids == head.target_ids.tolist()
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)


def test_sglang_computes_the_same_logits_with_an_eagle_2_head(tmp_path: Path) -> None:
    head = random_eagle2()
    embedding, head.lm_head, ids, states = inputs(1)
    written(head, tmp_path, embedding)
    own = own_logits(head, embedding, ids, states)
    name, _, found = forked.run(logits_of_sglang, tmp_path, 1)
    assert name == "LlamaForCausalLMEagle"
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
