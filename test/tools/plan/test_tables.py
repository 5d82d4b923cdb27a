"""Tables: interpolation, the file and its errors, and those computed from data sheets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.tools.plan import cards, tables
from sglang_qspec.tools.plan.cards import CARDS, HOST_S, MODELS, computed
from test.tools.plan.examples import flat


def record(**changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(flat()), **changes}


def test_tables_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    tables.save(flat(["1101", "10"]), path)
    assert tables.load(path) == flat(["1101", "10"])


def test_times_are_interpolated_over_requests_and_width() -> None:
    verify = [tables.Verify(b, w, 0.01 * b * w) for b in (1, 3) for w in (1, 5)]
    found = msgspec.structs.replace(flat(), verify=verify)
    assert found.verify_seconds(2, 3) == pytest.approx(0.06)
    assert found.verify_seconds(2, 1.5) == pytest.approx(0.03)
    assert (found.widest, found.most_requests) == (5, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "$.version"),
        ({"source": "guessed"}, "$.source"),
        ({"verify": []}, "length >= 1 - at `$.verify`"),
        ({"verify": [{"requests": 1, "width": 1, "seconds": 0}]}, "$.verify[0].seconds"),
        (
            {"verify": [{"requests": b, "width": b, "seconds": 1} for b in (1, 8)]},
            "no row with 1 requests and width 8",
        ),
        ({"agreement": {"step": 1.5}}, "$.agreement"),
        ({"agreement": {"step": ["12"]}}, "$.agreement"),
        ({"agreement": {}}, "$.agreement"),
        ({"slowdown": 0.5}, "$.slowdown"),
        ({"speed": 1}, "unknown field `speed`"),
    ],
)
def test_a_file_that_is_not_allowed_names_the_field(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(record(**changes)))
    with pytest.raises(ConfigError) as raised:
        tables.load(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.json, which cannot be read"):
        tables.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        tables.save(flat(), tmp_path / "none" / "tables.json")


def test_a_small_pass_reads_the_weights_and_a_large_one_computes() -> None:
    card, model = CARDS["H100"], MODELS["8B"]
    small = cards.pass_seconds(card, 1, model, 1, 1)
    reading = 2 * model.parameters / (0.8 * card.bandwidth)
    assert small - HOST_S == pytest.approx(reading, rel=0.02)
    large = cards.pass_seconds(card, 1, model, 256, 8 * 256)
    computing = 2 * model.parameters * 8 * 256 / (0.6 * card.flops)
    assert large - HOST_S == pytest.approx(computing)


def test_a_prefill_reads_the_weights_too() -> None:
    found = computed("H100:70B:1B", 0.8)
    assert 0.95 < found.prefill.seconds(1) / found.verify_seconds(1, 1) <= 1
    assert found.prefill.seconds(8000) == pytest.approx(HOST_S + 8000 * found.prefill.token)


def test_the_kv_of_the_requests_takes_time_and_memory() -> None:
    short, long = (computed("A10:8B:1B", 0.8, context) for context in (1024, 4096))
    kv = 4096 * MODELS["8B"].kv_bytes
    weights = 2 * MODELS["8B"].parameters
    assert long.most_requests * kv + weights < CARDS["A10"].memory
    assert long.most_requests < short.most_requests < 256
    assert long.verify_seconds(8, 1) > 1.1 * short.verify_seconds(8, 1)
    assert long.step_seconds(8) > short.step_seconds(8)
    # A request that does not fit beside the weights takes more cards.
    assert computed("A10:8B:1B", 0.8, 100_000).gpus.target == 2


@pytest.mark.parametrize(("card", "count"), [("H100", 4), ("H200", 2), ("B200", 1), ("A10", 8)])
def test_a_target_takes_the_cards_that_hold_it(card: str, count: int) -> None:
    found = computed(f"{card}:70B:1B", 0.8)
    assert (found.gpus.target, found.gpus.sidecar) == (count, 1)
    assert found.source == "computed"


@pytest.mark.parametrize("name", ["H100", "H100:8B", "V100:8B:1B", "H100:8B:2B", "a:b:c:d"])
def test_an_unknown_card_or_model_is_named_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="CARD:TARGET:DRAFT with a card of H100, H200, B200"):
        computed(name, 0.8)
