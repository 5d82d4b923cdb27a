"""Ragged passes are padded to a captured total of tokens, and cut to their rows afterwards."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_qspec.engine.cuda import ragged

TIERS = (8, 16, 32)


def batch_of(lengths: list[int]) -> Any:
    rows = sum(lengths)
    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=lengths, device=torch.device("cpu"), grid=[rows]
    )
    spec_info = SimpleNamespace(positions=torch.arange(rows) + 5, ragged_verify_layout=layout)
    return SimpleNamespace(
        input_ids=torch.arange(rows) + 100,
        out_cache_loc=torch.arange(rows) + 50,
        spec_info=spec_info,
    )


@pytest.mark.parametrize(
    ("lengths", "tier"), [([1, 1], 8), ([8], 8), ([8, 1], 16), ([8, 8, 8, 1], 32)]
)
def test_a_pass_gets_the_next_total(lengths: list[int], tier: int) -> None:
    batch, rows = batch_of(lengths), sum(lengths)
    own = batch.spec_info.ragged_verify_layout
    with ragged.padded(batch, TIERS):
        layout = batch.spec_info.ragged_verify_layout
        assert layout.graph_num_tokens == tier
        assert layout.verify_lens.tolist() == layout.verify_lens_cpu == lengths
        for padded in (batch.input_ids, batch.out_cache_loc, batch.spec_info.positions):
            assert len(padded) == tier
            assert (padded[:rows] > 0).all()
            assert not padded[rows:].any()
    assert batch.spec_info.ragged_verify_layout is own
    for restored in (batch.input_ids, batch.out_cache_loc, batch.spec_info.positions):
        assert len(restored) == rows


def test_a_pass_with_more_rows_than_any_graph_stays_as_it_is() -> None:
    for tiers in (TIERS, ()):
        batch = batch_of([30, 3])
        with ragged.padded(batch, tiers):
            total = batch.spec_info.ragged_verify_layout.graph_num_tokens
            assert len(batch.input_ids) == total == 33


def test_passes_of_one_width_are_not_padded() -> None:
    plain: Any = SimpleNamespace(spec_info=None, input_ids=torch.arange(3))
    uniform: Any = SimpleNamespace(
        spec_info=SimpleNamespace(ragged_verify_layout=None), input_ids=torch.arange(6)
    )
    for batch, rows in ((plain, 3), (uniform, 6)):
        with ragged.padded(batch, TIERS):
            assert len(batch.input_ids) == rows


def test_the_logits_of_the_added_rows_are_dropped() -> None:
    output: Any = SimpleNamespace(next_token_logits=torch.rand(8, 4), hidden_states=None)
    ragged.cut(output, 3)
    assert output.next_token_logits.shape == (3, 4)
    output = SimpleNamespace(next_token_logits=torch.rand(8, 4), hidden_states=torch.rand(8, 2))
    ragged.cut(output, 3)
    assert output.hidden_states.shape == (3, 2)
