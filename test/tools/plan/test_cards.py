"""Tables that are computed from data sheets."""

from __future__ import annotations

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.plan import cards
from sglang_qspec.tools.plan.cards import CARDS, MODELS, TODAY, computed


def test_a_small_pass_reads_the_weights_and_a_large_one_computes() -> None:
    card, model = CARDS["H100"], MODELS["8B"]
    small = cards.pass_seconds(card, 1, model, 1, 1)
    reading = 2 * model.parameters / (0.8 * card.bandwidth)
    assert small == pytest.approx(reading, rel=0.02)
    large = cards.pass_seconds(card, 1, model, 256, 8 * 256)
    computing = 2 * model.parameters * 8 * 256 / (0.6 * card.flops)
    assert large == pytest.approx(computing)


def test_a_prefill_reads_the_weights_too() -> None:
    found = computed("H100:70B:1B", 0.8)
    assert 0.95 < found.prefill.seconds(1) / found.passes(1, 1) <= 1
    assert found.prefill.seconds(8000) == pytest.approx(8000 * found.prefill.token)


def test_the_kv_of_the_requests_takes_time_and_memory() -> None:
    short, long = (computed("A10:8B:1B", 0.8, context) for context in (1024, 4096))
    kv = 4096 * MODELS["8B"].kv_bytes
    weights = 2 * MODELS["8B"].parameters
    assert long.passes.most_requests * kv + weights < CARDS["A10"].memory
    assert long.passes.most_requests < short.passes.most_requests < 256
    assert long.passes(8, 1) > 1.1 * short.passes(8, 1)
    assert long.step_seconds(8) > short.step_seconds(8)
    # A request that does not fit beside the weights takes more cards.
    assert computed("A10:8B:1B", 0.8, 100_000).gpus.target == 2


def test_a_pass_over_trees_takes_longer_where_attention_cascades() -> None:
    hopper, other = (computed(f"{card}:8B:0.6B").passes for card in ("H100", "B200"))
    assert hopper(1, 2) - hopper(1, 1) == pytest.approx(32 * TODAY.cascade, rel=1e-3)
    assert other(1, 2) == pytest.approx(other(1, 1))


def test_a_server_with_drafts_waits_for_the_host_and_a_draft_step_is_launched() -> None:
    found = computed("H100:8B:0.6B")
    assert [found.gap_seconds(n) for n in (1, 8, 20, 128)] == pytest.approx(
        [0.001, 0.0013, 0.0016, 0.004]
    )
    read = cards.pass_seconds(CARDS["H100"], 1, MODELS["0.6B"], 8, 8)
    assert found.step_seconds(8) == pytest.approx(TODAY.step_launch + read)
    assert MODELS["0.6B"].kv_bytes == 112 * 1024


def test_an_agreement_that_is_not_given_is_named_as_assumed() -> None:
    assert computed("H100:8B:0.6B").conditions["alpha"] == "0.7, assumed"
    assert computed("H100:8B:0.6B", 0.8).agreement == {"step": 0.8}


@pytest.mark.parametrize(("card", "count"), [("H100", 4), ("H200", 2), ("B200", 1), ("A10", 8)])
def test_a_target_takes_the_cards_that_hold_it(card: str, count: int) -> None:
    found = computed(f"{card}:70B:1B", 0.8)
    assert (found.gpus.target, found.gpus.sidecar) == (count, 1)
    assert found.source == "computed"


@pytest.mark.parametrize("name", ["H100", "H100:8B", "V100:8B:1B", "H100:8B:2B", "a:b:c:d"])
def test_an_unknown_card_or_model_is_named_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="CARD:TARGET:DRAFT with a card of H100, H200, B200"):
        computed(name, 0.8)
