"""A slot of SGLang's adapters keeps nothing of the adapter before."""

from types import SimpleNamespace

import pytest
import torch

from sglang_qspec.engine.scheduler import lora_slots


@pytest.mark.parametrize(("algorithm", "cleared"), [("QSPEC", True), (None, False)])
def test_embedding_and_lm_head_of_the_slot_alone_are_cleared(
    algorithm: str | None, cleared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(lora_slots, "get_spec", lambda: spec)
    names = ("embedding_A_buffer", "embedding_B_buffer", "lm_head_A_buffer", "lm_head_B_buffer")
    pool = SimpleNamespace(**{name: {"part": torch.ones(3, 2, 2)} for name in names})
    lora_slots.clear(pool, "an adapter", 1, None)
    for name in names:
        sums = getattr(pool, name)["part"].sum(dim=(1, 2)).tolist()
        assert sums == ([4, 0, 4] if cleared else [4, 4, 4])
