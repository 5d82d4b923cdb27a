"""The time that the plugin adds to a scheduler iteration, on made-up records."""

import json
from typing import Any

import pytest

from benchmark.overhead.iterations import added, plain_decode, read


def line(**changes: Any) -> str:
    """A decode iteration of 20 ms: 12 ms in the model, 5 around it, 1 in a hook, 2 elsewhere."""
    row: dict[str, Any] = {
        "decode": True,
        "running": 4,
        "width": 3,
        "period": 20_000_000,
        "worker": 17_000_000,
        "model": 12_000_000,
        "hooks": {"poll": 1_000_000},
        "parts": {"propose": 3_000_000, "sample": 500_000},
    }
    return json.dumps({**row, **changes})


def test_iterations_that_do_not_decode_are_left_out() -> None:
    assert [i.running for i in read([line(), line(decode=False), line(running=2)])] == [4, 2]


def test_an_iteration_is_split_into_model_plugin_and_scheduler_time() -> None:
    (iteration,) = read([line()])
    assert iteration.around_model == pytest.approx(5.0)
    assert iteration.ours == pytest.approx(6.0)
    assert iteration.outside_model == pytest.approx(8.0)


def test_added_time_is_the_plugins_time_minus_a_plain_steps_time_around_the_model() -> None:
    plain = plain_decode(read([line(worker=13_500_000, period=15_000_000, hooks={}, parts={})] * 3))
    assert plain.step == pytest.approx(13.5)
    found = added(read([line(), line(), line(hooks={"poll": 31_000_000})]), plain)
    assert found.median == pytest.approx(6.0 - 1.5)
    assert found.p99 == pytest.approx(36.0 - 1.5)
    assert found.whole == pytest.approx(8.0 - 3.0)
    assert (found.iterations, found.width) == (3, 3.0)


def test_the_parts_add_up_to_the_mean_plugin_time() -> None:
    iterations = read([line(), line(parts={"propose": 1_000_000}, worker=14_000_000)])
    found = added(iterations, plain_decode(iterations))
    assert sum(found.parts.values()) == pytest.approx(sum(i.ours for i in iterations) / 2)
    assert found.parts["propose"] == pytest.approx(2.0)
    assert found.parts["hook: poll"] == pytest.approx(1.0)
    assert list(found.parts.values()) == sorted(found.parts.values(), reverse=True)


def test_without_iterations_there_is_nothing_to_report() -> None:
    with pytest.raises(ValueError, match="no iteration"):
        plain_decode([])
