"""The row of a load, its prompts, and the reason why a small GPU is left out."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from benchmark.gpu_check import speedup
from benchmark.gpu_check.findings import NotHereError
from benchmark.gpu_check.speedup import Traffic
from benchmark.harness.run import Answer, Run


def run(seconds: float, *answers: tuple[int, ...], passes: int) -> Run:
    return Run(
        seconds, tuple(Answer(ids, seconds, seconds, passes, 4, {"step": 3}) for ids in answers)
    )


def test_a_row_compares_the_two_servers() -> None:
    plain = run(2.0, (1, 2, 3, 4), (5, 6, 7, 8), passes=3)
    drafted = run(1.0, (1, 2, 3, 4), (5, 6, 9, 9), passes=2)
    row = speedup.compared(Traffic("greedy", "queue", 2), plain, drafted)
    assert (row["kind"], row["arrival"], row["in_flight"]) == ("greedy", "queue", 2)
    assert (row["plain_tokens_per_s"], row["tokens_per_s"], row["speedup"]) == (4.0, 8.0, 2.0)
    assert row["accept_len"] == 1.5  # six tokens after the prefills, in four passes
    assert (row["accepted"], row["proposed"], row["equal_share"]) == ({"step": 6}, 8, 0.5)
    sampled = speedup.compared(Traffic("sampled", "queue", 2), plain, drafted)
    assert sampled["equal_share"] is None
    assert speedup.table([row, sampled]).text().count("queue") == 2


def test_each_load_has_prompts_of_its_own() -> None:
    texts = speedup.texts()
    assert len(set(texts)) == len(texts)
    loads = len(speedup.KINDS) * len(speedup.ARRIVALS)
    needed = [max(speedup.LEAST, speedup.EACH * level) + level for level in speedup.LEVELS]
    assert len(texts) >= loads * sum(needed)


def test_a_small_gpu_is_left_out_with_its_size() -> None:
    properties = SimpleNamespace(total_memory=24 << 30)
    with (
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        pytest.raises(NotHereError, match="70 GiB; this one has 24"),
    ):
        speedup._needs_memory()
